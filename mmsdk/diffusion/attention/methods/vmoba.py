"""VMoBA: queries choose chunks of keys by the chunks' means; layers take chunks in time, in space, and in both, in turn.

Source: VMoBA: Mixture-of-Block Attention for Video Diffusion Models, arXiv 2506.23858. Published: layers cycle through chunks of 2 frames,
of 4 x 13 tokens of all frames, and of 4 frames of 4 x 13 tokens (sizes of FastVideo's configuration for Wan); a query's gate is its product
with each chunk's mean key, brought between 0 and 1 by the least and the largest of its row; its own chunk is always read, and of the others
the largest until the chunks hold 0.25 of the row's sum, at least one. Dense until step 12.
Reconstruction: a block of queries reads a chunk when any of its queries does, so that no query loses what it chose.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from mmsdk.diffusion.attention.blocks import arranged, heads_of, pooled
from mmsdk.diffusion.attention.layout import text_kept, tiles
from mmsdk.diffusion.attention.types import Blocks, Choice, Everything, Grid, Place, Selection

__all__ = ["Vmoba"]


@dataclass(frozen=True, slots=True)
class Vmoba:
    """The share of a row's gates that is read, the steps that are dense, and the sides of the chunks in tokens."""

    threshold: float = 0.25
    dense_steps: int = 12
    temporal_frames: int = 2
    spatial_height: int = 4
    spatial_width: int = 13
    both_frames: int = 4
    both_height: int = 4
    both_width: int = 13
    block: int = 64

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"], place: Place
    ) -> Choice:
        if place.step < self.dense_steps:
            return Everything()
        shape = self.chunk(place.grid, place.layer)
        whole = tiles(place.grid, shape, shape[0] * shape[1] * shape[2], query.device)
        cut = tiles(place.grid, shape, self.block, query.device)
        means = heads_of(whole.video(pooled(arranged(keys, whole.blocks), whole.blocks)), query.shape[1])
        gates = arranged(query, cut.blocks).float() @ means.transpose(2, 3)
        own = _by_token(cut.tile.clamp(min=0), cut.blocks, query)
        chosen = _any_of_block(_read(gates, own, self.threshold), cut.blocks)
        mask = chosen.index_select(3, cut.tile.clamp(min=0))
        return Selection(text_kept(mask, cut.tile, cut.tile), cut.blocks, cut.blocks)

    def chunk(self, grid: Grid, layer: int) -> tuple[int, int, int]:
        """The sides of a layer's chunks, within those of the grid."""
        shapes = (
            (self.temporal_frames, grid.height, grid.width),
            (grid.frames, self.spatial_height, self.spatial_width),
            (self.both_frames, self.both_height, self.both_width),
        )
        frames, height, width = shapes[layer % 3]
        return min(frames, grid.frames), min(height, grid.height), min(width, grid.width)


def _read(gates: Float[Tensor, "b h n chunks"], own: Int[Tensor, " n"], threshold: float) -> Bool[Tensor, "b h n chunks"]:
    """The chunks that each query reads."""
    low, high = gates.aminmax(dim=-1, keepdim=True)
    gates = (gates - low) / (high - low).where(high > low, 1)
    mine = F.one_hot(own, gates.shape[3]).bool()
    shares = gates / gates.sum(-1, keepdim=True).clamp_min(1e-6)
    wanted = threshold - (shares * mine).sum(-1, keepdim=True)
    ranked, order = shares.masked_fill(mine, -1).sort(dim=-1, descending=True, stable=True)
    before = F.pad(ranked.clamp_min(0).cumsum(-1), (1, -1))
    first = torch.arange(gates.shape[3], device=gates.device) < 1
    return torch.zeros_like(gates, dtype=torch.bool).scatter_(3, order, (before < wanted) | first) | mine


def _by_token(x: Int[Tensor, " blocks"], blocks: Blocks, like: Tensor) -> Int[Tensor, " n"]:
    """An entry a block as an entry a place."""
    return x.repeat_interleave(blocks.sizes(like.device)[0, 0], output_size=blocks.length)


def _any_of_block(x: Bool[Tensor, "b h n chunks"], blocks: Blocks) -> Bool[Tensor, "b h blocks chunks"]:
    """Whether any token of a block is true."""
    seen = F.pad(x.cumsum(2, dtype=torch.int32), (0, 0, 1, 0))
    return seen.index_select(2, blocks.bounds(x.device)[0, 0]).diff(dim=2) > 0
