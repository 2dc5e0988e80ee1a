"""DraftAttention: a low-resolution map of each frame's patches says which regions attend to which.

Source: DraftAttention, arXiv 2505.14708. Published: queries and keys are averaged over patches of 8 x 16 tokens of a frame, which makes a
map softmax(q k^T / sqrt(d)) of patches by patches; of each head's map the largest entries are kept, one tenth of all of them; tokens are
reordered so that a patch is a block, and back. Reconstruction: every patch also reads itself, since a row of the map may keep no entry.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mmsdk.diffusion.attention.blocks import arranged, kept_most, pooled, scores, share_of
from mmsdk.diffusion.attention.layout import expanded, tiles, window
from mmsdk.diffusion.attention.types import Choice, Place, Selection

__all__ = ["Draft"]


@dataclass(frozen=True, slots=True)
class Draft:
    """The share of a head's map that is left out."""

    sparsity: float = 0.9

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"], place: Place
    ) -> Choice:
        tiling = tiles(place.grid, (1, 8, 16), 128, query.device)
        q, k = (tiling.video(pooled(arranged(x, tiling.blocks), tiling.blocks)) for x in (query, keys))
        draft = scores(q, k).softmax(-1)
        kept = kept_most(draft.flatten(2), share_of(1 - self.sparsity, tiling.count**2)).view_as(draft)
        own = window(tiling.shape, (1, 1, 1), False, query.device)
        return Selection(expanded(kept | own, tiling.tile, tiling.tile), tiling.blocks, tiling.blocks)
