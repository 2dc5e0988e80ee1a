"""Several tokens as one entry, and several memories as one: what a coarse level of a memory is made of.

    sum_j e^(q . k_j)  is about  |t| e^(q . kbar_t)            kbar_t: the mean of the keys of the tokens t

to first order in k_j - kbar_t, and never above it (Jensen). So tokens that lie close together become one entry: the mean of their keys and
of their values, and a score to which log |t| is added, that it weighs as much as they did. Means of turned keys are meant, as the sum is
over those; where neighbours turn fast against each other, their mean is short, as it should be.

What several memories give a query, each by itself, is joined by their log-sum-exps, exactly (FlashAttention, arXiv 2205.14135):

    lse = log sum_i exp(lse_i),   out = sum_i out_i exp(lse_i - lse)

Letters: b rows, h heads, g key-value heads, n entries, m tokens that become one, d width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["Means", "Partial", "coarser", "joined", "merged", "over", "scores", "together"]

Partial = tuple[Float[Tensor, "b h d"], Float[Tensor, "b h"]]
"""What a query gets from a memory, and the log-sum-exp of its scores there, in float32; nothing seen is 0 and -inf."""


@dataclass(frozen=True, slots=True)
class Means:
    """Means of keys and of values, how many tokens each is of, and the position of the latest; 0 and -1 for one that is of none."""

    keys: Float[Tensor, "b g n d"]
    values: Float[Tensor, "b g n d"]
    sizes: Int[Tensor, "b n"]
    positions: Int[Tensor, "b n"]

    @property
    def count(self) -> int:
        """How many there are."""
        return self.sizes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.keys.nbytes + self.values.nbytes + self.sizes.nbytes + self.positions.nbytes

    def part(self, start: int, stop: int) -> "Means":
        """Some of them: a view."""
        here = slice(start, stop)
        return Means(self.keys[:, :, here], self.values[:, :, here], self.sizes[:, here], self.positions[:, here])

    def blank(self) -> "Means":
        """One like these that is of no token."""
        keys, values = (torch.zeros_like(x[:, :, :1]) for x in (self.keys, self.values))
        return Means(keys, values, torch.zeros_like(self.sizes[:, :1]), torch.full_like(self.positions[:, :1], -1))

    def rows(self, here: slice) -> "Means":
        """Those of some rows: a view."""
        return Means(self.keys[here], self.values[here], self.sizes[here], self.positions[here])

    def put(self, other: "Means") -> None:
        """Become others, in place."""
        for mine, new in zip(
            (self.keys, self.values, self.sizes, self.positions), (other.keys, other.values, other.sizes, other.positions), strict=True
        ):
            mine.copy_(new)

    def select(self, rows: Int[Tensor, " r"]) -> "Means":
        """A copy of these rows."""
        return Means(self.keys[rows], self.values[rows], self.sizes[rows], self.positions[rows])


def merged(keys: Float[Tensor, "b g n m d"], values: Float[Tensor, "b g n m d"], positions: Int[Tensor, "b n m"]) -> Means:
    """One for each block, of its real tokens (those whose position is not below 0); sums in float32."""
    valid = positions >= 0
    sizes = valid.sum(2)
    share = valid[:, None, ..., None].float() / sizes.clamp_min(1)[:, None, :, None, None]
    key, value = ((x.float().masked_fill(~valid[:, None, ..., None], 0) * share).sum(3).to(x.dtype) for x in (keys, values))
    return Means(key, value, sizes, positions.amax(2))


def coarser(means: Means, by: int) -> Means:
    """One for every `by` neighbours, each of which counts by its tokens; their number must be a multiple of it."""
    sizes = means.sizes.unflatten(1, (-1, by))
    total = sizes.sum(2)
    share = (sizes.float() / total.clamp_min(1)[..., None])[:, None, ..., None]
    key, value = ((x.float().unflatten(2, (-1, by)) * share).sum(3).to(x.dtype) for x in (means.keys, means.values))
    return Means(key, value, total, means.positions.unflatten(1, (-1, by)).amax(2))


def together(parts: Sequence[Means]) -> Means:
    """All of them, one behind the other: a copy."""
    keys, values = torch.cat([part.keys for part in parts], 2), torch.cat([part.values for part in parts], 2)
    return Means(keys, values, torch.cat([part.sizes for part in parts], 1), torch.cat([part.positions for part in parts], 1))


def scores(query: Float[Tensor, "b h d"], means: Means) -> Float[Tensor, "b g r n"]:
    """q . kbar / sqrt(d) + log |t| for the r heads of each group, -inf for one that is of no token."""
    heads = query.float().unflatten(1, (means.keys.shape[1], -1))
    found: Tensor = heads @ means.keys.float().transpose(2, 3) * query.shape[2] ** -0.5
    return found + means.sizes.float().log()[:, None, None]


def over(query: Float[Tensor, "b h d"], values: Float[Tensor, "b g n d"], found: Float[Tensor, "b g r n"]) -> Partial:
    """Attention under these scores; a query for which all are -inf gets 0."""
    if found.shape[3] == 0:
        return torch.zeros_like(query), torch.full(query.shape[:2], -torch.inf, device=query.device)
    lse = found.logsumexp(-1)
    weights = (found - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return (weights @ values.float()).flatten(1, 2).to(query.dtype), lse.flatten(1)


def joined(parts: Sequence[Partial]) -> Float[Tensor, "b h d"]:
    """What a query gets from all the memories together; 0 where none shows it anything."""
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    peak = lses.amax(0)
    shares = (lses - peak.masked_fill(peak == -torch.inf, 0)).exp()
    mixed: Tensor = (outs.float() * (shares / shares.sum(0).clamp_min(torch.finfo(torch.float32).tiny))[..., None]).sum(0)
    return mixed.to(outs.dtype)
