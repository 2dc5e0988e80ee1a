"""A cache that asks what a thought was for: bits and eviction by segments (ThinKV, arXiv 2510.01290).

128 tokens are a segment. How sparse its attention was tells of which kind it is:

    sparsity of a query    the share of entries whose weight is below a hundredth of the largest
    kind                   sparsity         bits    gives way
    transition             high on          2       first: a turn of thought ("wait, ...") has done its work
    execution              below low        4       next: it carries out what was decided
    reasoning              in between       4       last

    every transition lowers what each segment before it keeps: all, 64, 32, 16, 8, 4 tokens

[published] segments of reasoning, execution and transition told by the sparsity of attention, precision and eviction by kind, slots of
what was evicted taken by new tokens in place; less than 5 % of a cache with little loss, which is the paper's number, not ours.
[reconstruction] the rest: the measure of sparsity and its borders, which want setting for a model, one query in 32 as a sample, which kind
is where, 4 and 2 bits with a scale for 16 channels, 128 tokens, the series of what is kept, that the tokens kept are those whose keys
differ most, that segments give way when there is no room, an eighth of which is for transitions. A prompt is no thought: it is taken for
reasoning, and gives way for want of room alone.

Beside the budget a layer holds its open segment, fewer than 128 tokens, as it is.
"""

from dataclasses import dataclass

from mmsdk.errors import BudgetError
from mmsdk.kv.policy import Amount
from mmsdk.kv.thoughts import Thoughts

__all__ = ["Thinkv"]


@dataclass(frozen=True, slots=True)
class Thinkv:
    """`low` and `high` are the borders of sparsity; `group` channels share a scale, or all of a head that they do not divide."""

    low: float = 0.8
    high: float = 0.95
    group: int = 16

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high or self.group < 1:
            raise BudgetError(f"thinkv: borders 0 <= low <= high and a group of at least 1, got {self.low}, {self.high} and {self.group}")

    @property
    def bounds(self) -> bool:
        """Always."""
        return True

    def store(self, layer: int, depth: int, amount: Amount) -> Thoughts:
        """See `mmsdk.kv.policy.Storer`."""
        return Thoughts(self, amount, layer, depth)
