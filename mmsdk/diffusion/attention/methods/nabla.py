"""NABLA: of a map between block means the entries that make up most of its mass, and a sliding-tile window.

Source: NABLA: Neighborhood Adaptive Block-Level Attention, arXiv 2507.13546. Published, as in diffusers' Kandinsky 5 (`nablaT_v2`): queries
and keys are averaged over 64 tokens, 1 x 8 x 8 of the video; in each row of softmax(q k^T / sqrt(d)), sorted ascending, the entries from
where the sum reaches 1 - P on are kept, P = 0.9; to them comes a window of 3 x 3 x 3 tiles, cut off at an edge.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.diffusion.attention.blocks import arranged, pooled, scores
from mmsdk.diffusion.attention.layout import expanded, tiles, window
from mmsdk.diffusion.attention.types import Choice, Place, Selection

__all__ = ["Nabla"]


@dataclass(frozen=True, slots=True)
class Nabla:
    """The mass P that is kept of each row, and the sides of the window in tiles of 1 x 8 x 8 tokens."""

    mass: float = 0.9
    window_frames: int = 3
    window_height: int = 3
    window_width: int = 3

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"], place: Place
    ) -> Choice:
        tiling = tiles(place.grid, (1, 8, 8), 64, query.device)
        q, k = (tiling.video(pooled(arranged(x, tiling.blocks), tiling.blocks)) for x in (query, keys))
        ranked, order = scores(q, k).softmax(-1).sort(dim=-1, stable=True)
        kept = torch.zeros_like(ranked, dtype=torch.bool).scatter_(3, order, ranked.cumsum(-1) >= 1 - self.mass)
        near = window(tiling.shape, (self.window_frames, self.window_height, self.window_width), False, query.device)
        return Selection(expanded(kept | near, tiling.tile, tiling.tile), tiling.blocks, tiling.blocks)
