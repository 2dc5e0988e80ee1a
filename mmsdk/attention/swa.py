"""Sliding-window attention: the last n tokens as they are, the token itself among them (Longformer, arXiv 2004.05150; Mistral 7B,
arXiv 2310.06825).

A query at position p sees the entries at positions p - n + 1 to p. Here it is the nearest level of a memory (DeepSeek-V4, n = 128), whose
one head is keys and values at once.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.attention.levels import over_heads
from mmsdk.kv.types import LayerView

__all__ = ["Recent"]


@dataclass(frozen=True, slots=True)
class Recent:
    """The window before each query, over keys of which only some may be in it. A position of -1 is no token.

    `ahead` is given where the keys lie in order without a gap: key column ahead + i is then that of query i, and a slice of queries reads
    only the columns of its own windows.
    """

    keys: Float[Tensor, "b t d"]
    positions: Int[Tensor, "b t"]
    queries: Int[Tensor, "b s"]
    window: int
    ahead: int | None

    @staticmethod
    def of(view: LayerView, queries: Int[Tensor, "b s"], window: int) -> "Recent":
        """Over a cache's view of one shared head, the new tokens at its end."""
        ahead = view.keys.shape[2] - queries.shape[1] if view.ordered else None
        return Recent(view.keys[:, 0], torch.where(view.valid, view.positions, -1), queries, window, ahead)

    @property
    def entries(self) -> int:
        """Columns of keys."""
        return self.keys.shape[1]

    def numbers(self, heads: int) -> int:
        """Nothing where windows are cut out, since slices are short then; else a row of scores."""
        return 0 if self.ahead is not None else heads * self.keys.shape[1]

    def scores(self, query: Float[Tensor, "b h s d"]) -> Float[Tensor, "b h s t"]:
        """See `Level`."""
        key, at = self.positions[:, None, :], self.queries[:, :, None]
        seen = (key >= 0) & (key <= at) & (key > at - self.window)
        return over_heads(query, self.keys).masked_fill(~seen[:, None], -torch.inf)

    def mix(self, weights: Float[Tensor, "b h s t"]) -> Float[Tensor, "b h s d"]:
        """See `Level`."""
        b, h, s, t = weights.shape
        return torch.bmm(weights.reshape(b, h * s, t), self.keys).view(b, h, s, -1)

    def part(self, start: int, stop: int) -> "Recent":
        """These queries, and the columns that any of them sees."""
        queries = self.queries[:, start:stop]
        if self.ahead is None:
            return replace(self, queries=queries)
        first = max(0, self.ahead + start - self.window + 1)
        keys, positions = self.keys[:, first : self.ahead + stop], self.positions[:, first : self.ahead + stop]
        return replace(self, keys=keys, positions=positions, queries=queries, ahead=self.ahead + start - first)
