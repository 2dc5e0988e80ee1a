"""Compressed sparse attention: every m tokens become one entry, and an indexer picks which entries a query reads (DeepSeek-V4, 2.3.1).

Tokens are projected twice as wide, into two series a and b. Entry w is pooled, as in `mmsdk.attention.hca`, from 2 m tokens: series a of
window w - 1 and series b of window w, so that neighbouring entries overlap. The first window has no predecessor, whose gates are -inf.
Of the entries with w < (p + 1) // m a query reads the `topk` that `mmsdk.attention.indexer` scores highest. All of it published
(transformers' deepseek_v4); m is 4 there.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["Picked", "overlapped"]


def overlapped(series: Float[Tensor, "b windows m wide"]) -> Float[Tensor, "b w slots d"]:
    """For each window but the first: series a of the window before it, then its own series b."""
    first, second = series.chunk(2, dim=-1)
    return torch.cat((first[:, :-1], second[:, 1:]), dim=2)


@dataclass(frozen=True, slots=True)
class Picked:
    """For each query its own k entries of a memory, by index; -1 picks nothing."""

    memory: Float[Tensor, "b t d"]
    index: Int[Tensor, "b s k"]

    @property
    def entries(self) -> int:
        """Entries a query."""
        return self.index.shape[2]

    def numbers(self, heads: int) -> int:
        """The entries laid out for the query, and its scores."""
        return self.index.shape[2] * (self.memory.shape[2] + heads)

    def scores(self, query: Float[Tensor, "b h s d"]) -> Float[Tensor, "b h s k"]:
        """See `mmsdk.attention.levels.Level`."""
        scores: Tensor = query.transpose(1, 2) * query.shape[-1] ** -0.5 @ self._gathered().transpose(2, 3)
        return scores.transpose(1, 2).float().masked_fill(self.index[:, None] < 0, -torch.inf)

    def mix(self, weights: Float[Tensor, "b h s k"]) -> Float[Tensor, "b h s d"]:
        """See `mmsdk.attention.levels.Level`."""
        return (weights.transpose(1, 2) @ self._gathered()).transpose(1, 2)

    def part(self, start: int, stop: int) -> "Picked":
        """The picks of these queries."""
        return replace(self, index=self.index[:, start:stop])

    def _gathered(self) -> Float[Tensor, "b s k d"]:
        rows = torch.arange(len(self.memory), device=self.index.device)[:, None, None]
        return self.memory[rows, self.index.clamp_min(0)]
