"""Three levels, older is coarser: what DeepSeek-V4 (arXiv 2606.19348) is trained with, for models that were not.

    the first tokens and the last ones     as they are                                       (V4: a window and a sink)
    mid, in front of the last              blocks of 16 behind their mean; those whose mean
                                           weighs most are recalled and read as they are     (V4: CSA and its indexer)
    far, everything older                  means of 16, 32, 64, ... tokens, all of them read (V4: HCA)

A mean of n tokens is the mean of their keys and values and counts as n of them (`mmsdk.kv.merging`); a block that is recalled is read in
place of its mean, so that nothing counts twice.

[published] the three levels, sizes that grow with distance and a choice by compressed entries are V4's, where all of it is learned.
[reconstruction] everything here: nothing is trained, means stand for learned compression and products with them for the indexer, originals
are kept in mid so that they can be recalled, far has several rates, and where positions of a stream close up a mean takes one place. V4's
numbers say nothing about it.
"""

from dataclasses import dataclass

from mmsdk.errors import BudgetError
from mmsdk.kv.policy import Amount
from mmsdk.kv.tiers import Sizes, Tiers

__all__ = ["Tiered"]


@dataclass(frozen=True, slots=True)
class Tiered:
    """Shares of the budget for `mid` and `far`, of mid's blocks that are recalled; the rest is the window.

    `interval` is by how many tokens the window may grow before levels move. Raises BudgetError for sizes and shares that cannot be.
    """

    block: int = 16
    mid: float = 0.25
    far: float = 0.25
    recall: float = 0.25
    sinks: int = 4
    interval: int = 64

    def __post_init__(self) -> None:
        if self.block < 1 or self.sinks < 0 or self.interval < self.block:
            raise BudgetError(
                f"tiered: blocks of {self.block}, {self.sinks} first tokens, an interval of {self.interval}: none below 1, "
                "and an interval of at least a block"
            )
        if min(self.mid, self.far, self.recall) < 0 or self.mid + self.far >= 1 or self.recall > 1:
            raise BudgetError(f"tiered: shares mid={self.mid}, far={self.far} and recall={self.recall} leave nothing for the window")

    def sizes(self, keep: int) -> Sizes:
        """Levels that hold at most `keep` tokens and means together, but never less than a mean and one exact token."""
        sinks, far = min(self.sinks, keep // 2), max(1, int(keep * self.far))
        mid = int(keep * self.mid) // (self.block + 1)
        window = max(1, keep - sinks - far - mid * (self.block + 1))
        return Sizes(sinks, window, self.block, mid, max(1, round(mid * self.recall)), far, self.interval)

    @property
    def bounds(self) -> bool:
        """Always."""
        return True

    @property
    def in_step(self) -> bool:
        """Levels move for all rows at once, at sizes of the longest."""
        return True

    def store(self, layer: int, depth: int, amount: Amount) -> Tiers:
        """See `mmsdk.kv.policy.Storer`."""
        return Tiers(self, amount, layer, depth)
