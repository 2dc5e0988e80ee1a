"""VSA: attention between tile means chooses the tiles that are read in full, and is a coarse branch of the output itself.

Source: VSA: Faster Video Diffusion with Trainable Sparse Attention, arXiv 2505.13389. Published: tiles of 4 x 4 x 4 tokens lie side by
side, those at an edge with the tokens that they have, which their means divide by; the coarse branch is dense attention between tile means,
each tile's result given to all of its tokens; every tile of queries reads the k tiles of keys with the highest coarse scores,
k = max(1, ceil((1 - sparsity) tiles)); out = coarse * gate + sparse, with a learned gate for each token. The gate comes with the model, in
`Place.gate`; without one, as in a model that was not trained for it, there is no coarse branch in the output (reconstruction). Text is
read by all and competes with no tile.
"""

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mmsdk.diffusion.attention.blocks import arranged, heads_of, kept_most, pooled, restored, scores, share_of
from mmsdk.diffusion.attention.layout import Tiling, expanded, tiles
from mmsdk.diffusion.attention.types import Choice, Place, Selection

__all__ = ["Vsa"]


@dataclass(frozen=True, slots=True)
class Vsa:
    """The share of tiles that a tile does not read, and the sides of a tile in tokens (4 x 8 x 8 is the other published one)."""

    sparsity: float = 0.9
    frames: int = 4
    height: int = 4
    width: int = 4

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"], place: Place
    ) -> Choice:
        shape = self.frames, self.height, self.width
        whole = tiles(place.grid, shape, math.prod(shape), query.device)
        cut = tiles(place.grid, shape, 64, query.device)
        q, k, v = (whole.video(pooled(arranged(x, whole.blocks), whole.blocks)) for x in (query, keys, values))
        coarse = scores(q, k)
        kept = kept_most(coarse, share_of(1 - self.sparsity, whole.count))
        residual = None
        if place.gate is not None:
            means = coarse.softmax(-1) @ heads_of(v, query.shape[1])
            residual = _spread(means, cut, query) * place.gate
        return Selection(expanded(kept, cut.tile, cut.tile), cut.blocks, cut.blocks, residual)


def _spread(means: Float[Tensor, "b h tiles d"], cut: Tiling, query: Float[Tensor, "b h s d"]) -> Float[Tensor, "b h s d"]:
    """Each tile's result at all of its tokens; 0 at those of text."""
    by_block = means.index_select(2, cut.tile.clamp(min=0)).masked_fill((cut.tile < 0)[:, None], 0)
    sizes = cut.blocks.sizes(query.device)[0, 0]
    laid = by_block.repeat_interleave(sizes, 2, output_size=query.shape[2])
    return restored(laid.to(query.dtype), cut.blocks)
