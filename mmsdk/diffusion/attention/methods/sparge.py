"""SpargeAttn: blocks whose tokens are alike are judged by their means, all others are computed.

Source: SpargeAttention, arXiv 2502.18137. Published: blocks of 128 queries and 64 keys (64 by 128 on an H100); the mean of a block, and its
self-similarity, the mean of the cosines of all pairs of its tokens; a block with at most `similarity` of it is unsure: such queries read
all keys, such keys are read by all. In the softmax of the scores between means, those of unsure keys -inf, the blocks are sorted, and kept
while the sum is at most `cdf`, or the first share `topk` of them, at least one. Keys are smoothed: less their mean over all tokens, which
changes no softmax. Published defaults: topk 0.5 with similarity -0.1; cdf 0.98 with similarity 0.6. The second stage, which leaves out
products with values of tiles far below the running maximum, is part of their kernel and not here.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from mmsdk.diffusion.attention.blocks import heads_of, pooled, scores, touching
from mmsdk.diffusion.attention.types import Blocks, Choice, Place, Selection

__all__ = ["Sparge"]


@dataclass(frozen=True, slots=True)
class Sparge:
    """By which rule blocks are kept and how many; `similarity` none is the published one of the rule. Blocks are counted in tokens."""

    rule: Literal["topk", "cdf"] = "topk"
    topk: float = 0.5
    cdf: float = 0.98
    similarity: float | None = None
    query_block: int = 128
    key_block: int = 64

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"], place: Place
    ) -> Choice:
        h = query.shape[1]
        rows, columns = Blocks(self.query_block, query.shape[2]), Blocks(self.key_block, keys.shape[2])
        smooth = keys.float() - keys.float().mean(2, keepdim=True)
        unsure = heads_of(self._unsure(smooth, columns), h)
        shares = scores(pooled(query, rows), pooled(smooth, columns)).masked_fill(unsure[:, :, None], -torch.inf).softmax(-1)
        # where all keys are unsure the softmax is no number, and all are read anyway
        kept = self._kept(shares.nan_to_num()) | unsure[:, :, None] | self._unsure(query, rows)[..., None]
        text = place.grid.text(query.device)
        kept = kept | touching(text, rows)[..., None] | touching(text, columns)[..., None, :]
        return Selection(kept, rows, columns)

    def _unsure(self, x: Float[Tensor, "b h n d"], blocks: Blocks) -> Bool[Tensor, "b h blocks"]:
        """The mean of the cosines of all pairs is the square of the mean of the unit vectors."""
        threshold = self.similarity if self.similarity is not None else {"topk": -0.1, "cdf": 0.6}[self.rule]
        return pooled(F.normalize(x.float(), dim=-1), blocks).square().sum(-1) <= threshold

    def _kept(self, shares: Float[Tensor, "b h rows columns"]) -> Bool[Tensor, "b h rows columns"]:
        ranked, order = shares.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(shares.shape[3], device=shares.device)
        wanted = (rank < int(self.topk * shares.shape[3])) if self.rule == "topk" else (ranked.cumsum(-1) <= self.cdf)
        return torch.zeros_like(shares, dtype=torch.bool).scatter_(3, order, (wanted | (rank < 1)).expand_as(order))
