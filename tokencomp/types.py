"""What a visual-token compressor is: fewer tokens in, and an account of what became of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.tokencomp.budget import Budget
from mmsdk.vision.types import VisualTokens

__all__ = ["Audit", "Compressed", "Compressor"]


@dataclass(frozen=True, slots=True)
class Audit:
    """Where every source token went.

    `assignment[i]` is the index of the kept token that source token i was merged into, or -1 where i was dropped.
    `scores` are the method's importance of each source token (zeros where it has none). `seconds` is the time of selection.
    """

    method: str
    assignment: Int[Tensor, " n"]
    scores: Float[Tensor, " n"]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Compressed:
    """The surviving tokens of one input, in reading order, and the audit."""

    tokens: VisualTokens
    audit: Audit


@runtime_checkable
class Compressor(Protocol):
    """Pure, deterministic and batched: result i depends on input i alone and has exactly `budgets[i].count` tokens."""

    def __call__(
        self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget], query: Float[Tensor, "q d"] | None = None
    ) -> list[Compressed]: ...
