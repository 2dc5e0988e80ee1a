"""Choosing by score so that noise decides nothing: scores that differ by less than a millionth are equal, and the earlier token wins.

Sums come out a little different on another machine, in another batch or after another order of adding; a choice that hung on the last
bit would change with them. Everything here is batched over leading dimensions and never asks the device for a value.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.kernels.choice import TIE, first_best, top

__all__ = ["TIE", "first_best", "first_in_tiers", "others", "place", "rank_within", "ranked", "rescaled", "top", "top_within"]


def top_within(scores: Float[Tensor, "b n"], group: Int[Tensor, "b n"], quota: Int[Tensor, "b g"]) -> Bool[Tensor, "b n"]:
    """Whether each token is among the `quota` of its group's largest scores; of those equal to the last one chosen, the earlier ones."""
    wanted = quota.gather(1, group)
    exact = rank_within(scores.argsort(dim=1, descending=True, stable=True), group, quota.shape[1])
    chosen = scores.masked_fill(exact >= wanted, torch.inf)
    last = torch.full_like(quota, torch.inf, dtype=scores.dtype).scatter_reduce(1, group, chosen, "amin").gather(1, group)
    tier = (scores >= last - TIE).to(torch.int8) + (scores > last + TIE).to(torch.int8)
    return rank_within(tier.argsort(dim=1, descending=True, stable=True), group, quota.shape[1]) < wanted


def ranked(scores: Float[Tensor, "*b n"]) -> Int[Tensor, "*b n"]:
    """All tokens from the largest score to the smallest, earlier ones first among equals.

    Equal are those within a millionth below the largest, then those within a millionth below the largest of the rest, and so on. Being
    equal does not carry over in a chain, so an order has to part some; where a number is to be chosen, `top` and `top_within` do not.
    """
    falling, order = (-scores).sort(dim=-1, stable=True)
    n = scores.shape[-1]
    # where the next tier would begin if one began here; n is behind the end
    following = F.pad(torch.searchsorted(falling, falling + TIE, right=True), (0, 1), value=n)
    begins = F.pad(torch.zeros_like(order), (0, 1)).index_fill(-1, torch.zeros(1, dtype=torch.int64, device=scores.device), 1)
    # tiers begin at 0 and wherever one follows: doubling the jump finds all in as many rounds as n has digits
    for _ in range(n.bit_length()):
        begins = begins.scatter_reduce(-1, following, begins, "amax")
        following = following.gather(-1, following)
    tier = torch.empty_like(order).scatter_(-1, order, begins[..., :n].cumsum(dim=-1))
    return tier.argsort(dim=-1, stable=True)


def first_in_tiers(tier: Int[Tensor, "b n"], scores: Float[Tensor, "b n"], count: int, tiers: int) -> Int[Tensor, "b m"]:
    """The first `count` tokens, ascending: those of lower tier in [0, tiers) before others, of the last one needed the best by score."""
    sizes = torch.zeros(len(tier), tiers, dtype=torch.int64, device=tier.device).scatter_add_(1, tier, torch.ones_like(tier))
    quota = (count - (sizes.cumsum(dim=1) - sizes)).clamp_min(0)
    inside = top_within(scores, tier, quota)
    return inside.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :count]


def place(order: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """The inverse of a permutation: where each token stands in `order`."""
    here = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, here)


def rank_within(order: Int[Tensor, "b n"], group: Int[Tensor, "b n"], groups: int) -> Int[Tensor, "b n"]:
    """The place of each token among those of its own group, counted from 0, when all are taken in `order`."""
    grouped = order.gather(1, group.gather(1, order).argsort(dim=1, stable=True))
    sizes = torch.zeros(len(group), groups, dtype=torch.int64, device=group.device).scatter_add_(1, group, torch.ones_like(group))
    return place(grouped) - (sizes.cumsum(dim=1) - sizes).gather(1, group)


def others(index: Int[Tensor, "b m"], n: int) -> Int[Tensor, "b k"]:
    """The tokens of range(n) that are not in `index` (distinct entries), ascending."""
    inside = torch.zeros(len(index), n, dtype=torch.int8, device=index.device).scatter_(1, index, 1)
    return inside.argsort(dim=1, stable=True)[:, : n - index.shape[1]]


def rescaled(scores: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
    """Scores on [0, 1] by their least and largest; where all are equal nothing is preferred and each is 1."""
    least, most = scores.aminmax(dim=-1, keepdim=True)
    flat = most - least <= TIE
    return ((scores - least) / (most - least).masked_fill(flat, 1.0)).masked_fill(flat, 1.0)
