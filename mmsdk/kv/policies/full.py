"""Everything is kept and read: the control that every other policy is measured against."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kv.entries import Entries
from mmsdk.kv.policy import Ask
from mmsdk.kv.shelf import attended

__all__ = ["Full"]


@dataclass(frozen=True, slots=True)
class Full:
    """Exact. The only policy that needs no budget."""

    @property
    def dense(self) -> int:
        """None of the layers is different."""
        return 0

    @property
    def latents(self) -> bool:
        """Nothing is judged."""
        return True

    def read(self, query: Float[Tensor, "b h 1 d"], entries: Entries, ask: Ask, keep: Int[Tensor, " b"]) -> Float[Tensor, "b h 1 e"]:
        """All of it."""
        return attended(query, entries, ask)
