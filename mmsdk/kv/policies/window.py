"""The last tokens and nothing else: the sliding window that other policies are measured against."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from mmsdk.kv.entries import Entries

__all__ = ["Window"]


@dataclass(frozen=True, slots=True)
class Window:
    """Keys stay where they were turned to."""

    interval: int = 1
    dense: int = 0

    def scores(self, entries: Entries, keep: Int[Tensor, " b"]) -> Int[Tensor, "b q t"]:
        """By age."""
        return entries.order
