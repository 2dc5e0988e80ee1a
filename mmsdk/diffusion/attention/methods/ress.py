"""ReSS: the blocks without which the residual stream would drift the most are kept, and the drop set is mended by swaps.

Source: Residual-restoring sparse attention, arXiv 2609.35593, for the global attention of VGGT, pi^3 and Depth Anything 3; what is
published is told in `mmsdk.diffusion.attention.ress`. Blocks of special tokens are read by all and read all: here those of text, for such
models `selection` takes the camera's and the registers'. Reconstruction: every head has the same budget (the paper takes those of HeSS).
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from mmsdk.diffusion.attention.blocks import heads_of, pooled, scores, touching
from mmsdk.diffusion.attention.ress import drop_scores, gram, restore
from mmsdk.diffusion.attention.types import Blocks, Choice, Place, Selection
from mmsdk.errors import InputError

__all__ = ["Ress"]


@dataclass(frozen=True, slots=True)
class Ress:
    """The share of key blocks that a row drops, the tokens of a block, the rounds of swaps and the share swapped."""

    sparsity: float = 0.73
    block: int = 64
    rounds: int = 5
    rho: float = 0.5

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"], place: Place
    ) -> Choice:
        if place.projection is None:
            raise InputError("it needs the layer's output projection, cut by heads, in Place.projection", item="ress")
        return self.selection(query, keys, values, place.projection, place.grid.text(query.device))

    def selection(
        self,
        query: Float[Tensor, "b h s d"],
        keys: Float[Tensor, "b g s d"],
        values: Float[Tensor, "b g s d"],
        projection: Float[Tensor, "h e d"],
        special: Bool[Tensor, " s"],
    ) -> Selection:
        """What is read where `special` tokens are to stay dense, wherever they stand."""
        h, blocks = query.shape[1], Blocks(self.block, query.shape[2])
        always = touching(special, blocks)[0, 0]
        shares = scores(pooled(query, blocks), pooled(keys, blocks)).softmax(-1)
        means, metric = heads_of(pooled(values, blocks), h), gram(projection)
        count = max(round((1 - self.sparsity) * blocks.count), 1, int(always.sum()))
        kept = restore(drop_scores(shares, means, metric), shares, means, metric, count, always, self.rounds, self.rho)
        return Selection(kept | always[:, None] | always, blocks, blocks)
