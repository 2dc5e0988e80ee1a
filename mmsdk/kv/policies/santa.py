"""Sampled attention over teams of keys (SANTA++; the exact sampler before it is SANTA, arXiv 2605.01910).

    team t = G tokens in a row, its representative the mean of their keys
    w_t  = |t| exp(q . kbar_t / sqrt(d))                              what the team is likely to weigh
    pi_t = min(1, c w_t),  c such that sum_t pi_t = S                 the chance that it is drawn
    out  = num / den,  num = sum_drawn 1/pi_t sum_(j in t) e^(s_j) v_j,  den the same without v_j

[published] without training, one representative scored for each team, teams sampled, exact scores inside them, weighed by the inverse of
their chance; 16-22 % of the reads at 94-99 % of the quality. These are the paper's numbers, not ours. [reconstruction] everything that
makes it a procedure: means as representatives, the chances and how c is found, systematic sampling with one uniform number for a key-value
head; that the teams of a row's first tokens and of its latest are always drawn. Teams of 8, where contexts of 32,000 may want 64 (their
means promise enough of a single token, which those of 16 do not), and the mean over the heads of a group are what did best in trials on
SmolLM2 at two thousand tokens.

num and den have the expectations of exact attention whatever the representatives are worth; their quotient is near it, and equals it where
all teams are drawn. Since 1/pi = e^(-log pi), the quotient is a softmax of s_j - log pi_t over what was drawn.

Letters: b rows, h heads, g key-value heads, n teams, m tokens of a team, k drawn teams, d width.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mmsdk.errors import BudgetError
from mmsdk.kernels.ops.block_worth import block_worth
from mmsdk.kv.blocked import Blocked, blocked, folded, least_of, most_of
from mmsdk.kv.entries import Entries
from mmsdk.kv.policy import Ask
from mmsdk.kv.shelf import attended

__all__ = ["Santa"]

Share = Literal["max", "mean"]

# Weights below e^-40 of the largest are taken for that: such a team may still be drawn, and its inverse chance is still a number.
_LEAST = -40.0


@dataclass(frozen=True, slots=True)
class Santa:
    """Teams of `team` tokens; `share` is how the heads of a group draw together; the same `seed` draws the same.

    The teams of the `sinks` first and the `recent` last tokens are always drawn. The first `dense` layers read everything. Raises
    BudgetError for sizes that cannot be.
    """

    team: int = 8
    share: Share = "mean"
    sinks: int = 4
    recent: int = 32
    seed: int = 0
    dense: int = 0

    def __post_init__(self) -> None:
        if self.team < 1 or self.sinks < 0 or self.recent < 1:
            raise BudgetError(f"santa: team={self.team} and recent={self.recent} are at least 1, sinks={self.sinks} not below 0")

    def read(self, query: Float[Tensor, "b h 1 d"], entries: Entries, ask: Ask, keep: Int[Tensor, " b"]) -> Float[Tensor, "b h 1 d"]:
        """Sampled attention; exact where the budget is as many teams as there are, and in layers with a window of their own."""
        forced = -(-self.sinks // self.team) - (-self.recent // self.team) + 1
        # one more than is always drawn, or the others would have no chance
        fewest, draws = (max(-(-amount // self.team), forced + 1) for amount in (least_of(entries, keep), most_of(entries, keep)))
        blocks = blocked(entries, self.team)
        # a row of a smaller budget reads no more beside others than alone
        if fewest >= blocks.count or ask.window:
            return attended(query, entries, ask)
        sums, always = folded(blocks, "sum", 0.0), self._always(blocks)
        teams = ((keep + self.team - 1) // self.team).clamp_min(forced + 1)[:, None]
        weights = likely(query[:, :, 0], sums, blocks.sizes, self.share)
        chances = inclusion(weights, always[:, None].expand_as(weights), teams)
        index = drawn(chances, uniforms(self.seed, entries.layer, sums.shape[1], ask.positions[:, 0]), teams, draws)
        # a representative is as large as half of a pair of key and value
        entries.read = sums.shape[0] * sums.shape[1] * (index.shape[2] * self.team + blocks.count // 2)
        return blocks.read(query, index, chances.gather(2, index.clamp_min(0)).log().neg().float())

    def _always(self, blocks: Blocked) -> Bool[Tensor, "b n"]:
        """The teams of the first and the last tokens of each row."""
        before = blocks.sizes.cumsum(1) - blocks.sizes
        behind = blocks.sizes.sum(1, keepdim=True) - before - blocks.sizes
        return (blocks.sizes > 0) & ((before < self.sinks) | (behind < self.recent))


def likely(
    query: Float[Tensor, "b h d"], sums: Float[Tensor, "b g n d"], sizes: Int[Tensor, "b n"], share: Share = "max"
) -> Float[Tensor, "b g n"]:
    """log w_t for each key-value head, from the sum of each team's keys; -inf for a team without tokens.

    The heads of a group draw together: each one's weights are made to sum to 1, and the largest ("max") or the mean over the group is what
    counts. The mean leaves the chances nearer to what all of them weigh, the largest gives every head the teams that it needs itself.
    """
    scores = block_worth(query[:, :, None], sums, None, sums.new_zeros(sums.shape[:3]), query.shape[2] ** -0.5, together=False)[:, :, :, 0]
    count = sizes.float()[:, None, None]
    shares = (scores / count.clamp_min(1) + count.log()).log_softmax(-1)
    # a row without tokens has nothing but -inf, and softmax no number for it
    shares = shares.masked_fill((sizes == 0)[:, None, None], -torch.inf)
    together: Tensor = shares.amax(2) if share == "max" else shares.logsumexp(2) - math.log(shares.shape[2])
    return together


def inclusion(weights: Float[Tensor, "*b n"], always: Bool[Tensor, "*b n"], teams: Shaped[Tensor, "*#b"]) -> Float[Tensor, "*b n"]:
    """pi_t from log w_t, in float64: 1 for those that are `always` drawn, 0 for -inf, and `teams` in sum.

    With m teams capped at 1, c = (teams - m) / (sum of the other weights); m is the least number for which no other exceeds 1. Sorted by
    weight, one sum over the tail answers that for every m at once. `teams` must be above the number of those always drawn, or the others
    have no chance. Fewer real teams than that are all drawn.
    """
    weights = weights.double()
    real = weights > -torch.inf
    rank, order = weights.masked_fill(always & real, torch.inf).sort(-1, descending=True)
    free = rank.isfinite()
    peak = rank.masked_fill(~free, -torch.inf).amax(-1, keepdim=True)
    size = (rank - peak.masked_fill(peak == -torch.inf, 0)).clamp(_LEAST, 0).exp().masked_fill(~free, 0)
    tail = size.flip(-1).cumsum(-1).flip(-1)
    left = (teams[..., None] - torch.arange(rank.shape[-1], device=rank.device)).clamp_min(0).double()
    # a weight capped with all before it: its share of what is left would be 1 or more
    capped = (rank == torch.inf) | (free & (left * size >= tail))
    count = capped.cumprod(-1, dtype=torch.long).sum(-1, keepdim=True)
    at = count.clamp_max(rank.shape[-1] - 1)
    # where no weight is left there is no chance either
    chance = left.expand_as(tail).gather(-1, at) / tail.gather(-1, at).clamp_min(1e-30) * size
    sure = torch.arange(rank.shape[-1], device=rank.device) < count
    return torch.empty_like(chance).scatter_(-1, order, chance.clamp_max(1).masked_fill(sure, 1))


def drawn(chances: Float[Tensor, "*b n"], uniform: Float[Tensor, "*b"], teams: Shaped[Tensor, "*#b"], most: int) -> Int[Tensor, "*b k"]:
    """Systematic sampling without replacement: which teams are drawn, k = min(most, n) places, -1 where fewer are.

    `most` is no less than any of `teams`.

    With running sums c_t of the chances and one u in [0, 1), team t is drawn where a whole number lies in (c_(t-1) + u, c_t + u]: with
    chance pi_t, and floor or ceil of `teams` in all. Chances are sorted first, so that sums of those that are 1 are whole and exact, and
    teams of like weight stand for each other.
    """
    ordered, order = chances.sort(dim=-1, descending=True, stable=True)
    sums = ordered.cumsum(-1)
    # the last bits of a sum must not cost a team, nor bring one too many
    marks = (sums.where(sums < teams[..., None] - 1e-9, teams[..., None].double()) + uniform[..., None]).floor()
    hit = marks.diff(dim=-1, prepend=torch.zeros_like(marks[..., :1])) > 0
    first = hit.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[..., :most]
    return order.gather(-1, first).masked_fill(~hit.gather(-1, first), -1)


def uniforms(seed: int, layer: int, heads: int, positions: Int[Tensor, " b"]) -> Float[Tensor, "b heads"]:
    """One number in [0, 1) for each row and key-value head, by splitmix64 of the seed, the layer, the head and the row's position.

    Nothing else enters, so that an answer repeats itself, in any batch. 24 bits: sums of a whole number and such a one are exact. Seeds
    are told apart below 2**18, layers and positions below 2**12 and 2**32.
    """
    mixed = _mixed(positions.long()[:, None] + ((seed % 2**18 << 44) + (layer << 32)))
    mixed = _mixed(mixed ^ torch.arange(heads, device=positions.device))
    return (mixed >> 40 & (2**24 - 1)).double() * 2.0**-24


def _mixed(x: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """A step of splitmix64 on signed numbers, which wrap around as unsigned ones do."""
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


def _shifted(x: Int[Tensor, "*n"], by: int) -> Int[Tensor, "*n"]:
    """To the right with zeros coming in."""
    shifted: Tensor = x >> by & (2 ** (64 - by) - 1)
    return shifted
