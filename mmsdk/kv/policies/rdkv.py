"""How many bits each entry of a cache is worth: rate and distortion, by reverse water-filling (RDKV, arXiv 2605.08317).

    b_i = max(0, log2(w_i sigma_i^2 / theta) / 2),        sum_i b_i = the budget

An entry of variance sigma^2 in b bits is wrong by about sigma^2 4^-b, and that counts by its weight w. Under the water level theta nothing
is worth storing; above it every entry ends up equally wrong.

[published] allocation once after the prompt, by reverse water-filling, from 0 bits (dropped) to 16 (as it is). [reconstruction] the formula
above; w_i the attention of the last tokens of the prompt times |v_i|; theta found by halving; rounding to 0, 2, 4, 8 or 16; and then steps
up or down in the order of what they gain for a bit, until the budget is met and not exceeded. The paper fills over channels too; here the
channels of keys are made alike (`mmsdk.kv.graded`) before entries are weighed. All heads of a layer share a budget: `keep` tokens of 16
bits each, scales and places not counted.

Letters: b rows, g key-value heads, t tokens, n entries, d width.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.errors import BudgetError
from mmsdk.kv.graded import Graded
from mmsdk.kv.policy import Amount

__all__ = ["Rdkv"]

LEVELS = (0, 2, 4, 8, 16)
_HALVINGS = 48


@dataclass(frozen=True, slots=True)
class Rdkv:
    """The last `window` tokens of the prompt are asked what they attend to, and stay as they are."""

    window: int = 32

    def __post_init__(self) -> None:
        if self.window < 1:
            raise BudgetError(f"rdkv asks at least the last token of a prompt, got window={self.window}")

    @property
    def bounds(self) -> bool:
        """A prompt is rounded once, and nothing goes afterwards."""
        return False

    def store(self, layer: int, depth: int, amount: Amount) -> Graded:
        """See `mmsdk.kv.policy.Storer`."""
        return Graded(self, amount, layer, depth)

    def bits(
        self,
        keys: Float[Tensor, "b g t d"],
        values: Float[Tensor, "b g t d"],
        received: Float[Tensor, "b g t"],
        recent: Bool[Tensor, "b t"],
        valid: Bool[Tensor, "b t"],
        keep: Int[Tensor, " b"],
    ) -> Int[Tensor, "b g t"]:
        """16 for recent tokens, and what is left of 16 bits for `keep` tokens of each head shared among all others."""
        worth = received * values.float().norm(dim=-1) * spread(keys, values)
        real = (valid & ~recent)[:, None].expand_as(worth)
        budget = (keep - recent.sum(1)) * LEVELS[-1] * keys.shape[1]
        found = allocate(worth.flatten(1), real.flatten(1), budget).view_as(worth)
        return found.masked_fill(recent[:, None], LEVELS[-1])


def spread(keys: Float[Tensor, "*b d"], values: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
    """sigma^2 of an entry: the variance over channels of its key and of its value, together."""
    return keys.float().var(-1, correction=0) + values.float().var(-1, correction=0)


def allocate(worth: Float[Tensor, "*b n"], real: Bool[Tensor, "*b n"], budget: Int[Tensor, "*b"]) -> Int[Tensor, "*b n"]:
    """Bits for each entry from w sigma^2: 0, 2, 4, 8 or 16; a budget is the sum over a row, in bits a number.

    The sum is at most the budget, and less by no more than a step (8 at most), but where all real entries have 16. Entries that are worth
    more never have fewer bits. Those that are not real have 0.
    """
    logs = worth.double().log2().masked_fill(~real, -torch.inf)
    wanted = _filled(logs, budget)
    edges = torch.tensor([(low + high) / 2 for low, high in pairwise(LEVELS)], device=worth.device)
    levels = torch.tensor(LEVELS, device=worth.device)
    bits = levels[torch.bucketize(wanted.float(), edges)]
    low, high = levels[:-1], levels[1:]
    # what a step saves in distortion for each of its bits, in log2: less with every step of an entry
    gains = logs[..., None] + ((4.0**-low - 4.0**-high) / (high - low)).double().log2()
    down = _first(-gains, real[..., None] & (high <= bits[..., None]), bits.sum(-1) - budget, enough=True)
    bits = bits - (down * (high - low)).sum(-1)
    up = _first(gains, real[..., None] & (low >= bits[..., None]), budget - bits.sum(-1), enough=False)
    return bits + (up * (high - low)).sum(-1)


def _filled(logs: Float[Tensor, "*b n"], budget: Int[Tensor, "*b"]) -> Float[Tensor, "*b n"]:
    """b_i as numbers with a fraction, at most 16, whose sum is the budget: log2 theta is halved into its place."""
    finite = logs.masked_fill(logs == -torch.inf, torch.inf)
    low = finite.amin(-1, keepdim=True).nan_to_num(posinf=0.0) - 2 * LEVELS[-1]
    high = logs.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        over = _bits(logs, middle).sum(-1, keepdim=True) > budget[..., None]
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    return _bits(logs, high)


def _bits(logs: Float[Tensor, "*b n"], level: Float[Tensor, "*b 1"]) -> Float[Tensor, "*b n"]:
    return ((logs - level) / 2).clamp(0, LEVELS[-1])


def _first(gains: Float[Tensor, "*b n s"], can: Bool[Tensor, "*b n s"], amount: Int[Tensor, "*b"], enough: bool) -> Bool[Tensor, "*b n s"]:
    """Of the steps that can be taken the first in order of gain: as many as make up the amount (`enough`), or as fit into it."""
    cost = torch.tensor([high - low for low, high in pairwise(LEVELS)], device=gains.device) * can
    rank = gains.masked_fill(~can, -torch.inf).flatten(-2)
    order = rank.sort(dim=-1, descending=True, stable=True).indices
    costs = cost.flatten(-2).gather(-1, order)
    total = costs.cumsum(-1)
    taken = total - costs < amount[..., None] if enough else total <= amount[..., None]
    return torch.zeros_like(can.flatten(-2)).scatter_(-1, order, taken).view_as(can) & can
