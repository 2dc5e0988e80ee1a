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

    @property
    def early(self) -> bool:
        """A new token sees the window that it is the last of."""
        return True

    @property
    def gapless(self) -> bool:
        """Only the first of what is held goes."""
        return True

    @property
    def latents(self) -> bool:
        """Only age counts."""
        return True

    def scores(self, entries: Entries, keep: Int[Tensor, " b"]) -> Int[Tensor, "b q t"]:
        """By age."""
        return entries.order
