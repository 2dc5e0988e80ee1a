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
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["Entries", "Part", "coarser", "joined", "merged", "over"]

Part = tuple[Float[Tensor, "b h d"], Float[Tensor, "b h"]]
"""What a query gets from a memory, and the log-sum-exp of its scores there, in float32; nothing seen is 0 and -inf."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Means of keys and of values, and how many tokens each of them is; 0 for an entry that is none."""

    keys: Float[Tensor, "b g n d"]
    values: Float[Tensor, "b g n d"]
    sizes: Int[Tensor, "b n"]

    @property
    def nbytes(self) -> int:
        """Bytes of the means and the sizes."""
        return self.keys.nbytes + self.values.nbytes + self.sizes.nbytes

    def part(self, start: int, stop: int) -> "Entries":
        """Some of them: a view."""
        return Entries(self.keys[:, :, start:stop], self.values[:, :, start:stop], self.sizes[:, start:stop])

    def followed(self, later: "Entries") -> "Entries":
        """These and then the later ones: a copy."""
        keys, values = torch.cat((self.keys, later.keys), 2), torch.cat((self.values, later.values), 2)
        return Entries(keys, values, torch.cat((self.sizes, later.sizes), 1))


def merged(keys: Float[Tensor, "b g n m d"], values: Float[Tensor, "b g n m d"], valid: Bool[Tensor, "b n m"]) -> Entries:
    """One entry for each block, from its real tokens; sums in float32."""
    sizes = valid.sum(2)
    share = valid[:, None, ..., None].float() / sizes.clamp_min(1)[:, None, :, None, None]
    means = ((x.float().masked_fill(~valid[:, None, ..., None], 0) * share).sum(3).to(x.dtype) for x in (keys, values))
    return Entries(*means, sizes)


def coarser(entries: Entries, by: int) -> Entries:
    """One entry for every `by` neighbours, each of which counts by its tokens; their number must be a multiple of it."""
    sizes = entries.sizes.unflatten(1, (-1, by))
    total = sizes.sum(2)
    share = (sizes.float() / total.clamp_min(1)[..., None])[:, None, ..., None]
    means = ((x.float().unflatten(2, (-1, by)) * share).sum(3).to(x.dtype) for x in (entries.keys, entries.values))
    return Entries(*means, total)


def scores(query: Float[Tensor, "b h d"], entries: Entries) -> Float[Tensor, "b g r n"]:
    """q . kbar / sqrt(d) + log |t| for the r heads of each group, -inf for an entry that is none."""
    heads = query.float().unflatten(1, (entries.keys.shape[1], -1))
    found: Tensor = heads @ entries.keys.float().transpose(2, 3) * query.shape[2] ** -0.5
    return found + entries.sizes.float().log()[:, None, None]


def over(query: Float[Tensor, "b h d"], values: Float[Tensor, "b g n d"], found: Float[Tensor, "b g r n"]) -> Part:
    """Attention under these scores; a query for which all are -inf gets 0."""
    if found.shape[3] == 0:
        return torch.zeros_like(query), torch.full(query.shape[:2], -torch.inf, device=query.device)
    lse = found.logsumexp(-1)
    weights = (found - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return (weights @ values.float()).flatten(1, 2).to(query.dtype), lse.flatten(1)


def joined(parts: Sequence[Part]) -> Float[Tensor, "b h d"]:
    """What a query gets from all the memories together; 0 where none shows it anything."""
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    peak = lses.amax(0)
    shares = (lses - peak.masked_fill(peak == -torch.inf, 0)).exp()
    mixed: Tensor = (outs.float() * (shares / shares.sum(0).clamp_min(torch.finfo(torch.float32).tiny))[..., None]).sum(0)
    return mixed.to(outs.dtype)
