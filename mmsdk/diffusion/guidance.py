"""Towards the text: classifier-free guidance, and models that have it distilled into them.

Classifier-Free Diffusion Guidance (arXiv 2207.12598): a step is predicted with the text and without it, and goes further in the direction
in which the two differ. A distilled model is asked once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from mmsdk.diffusion.types import Condition
from mmsdk.errors import InputError
from mmsdk.vision.values import shown

__all__ = ["ClassifierFree", "Distilled", "Guidance", "scale_of"]


@runtime_checkable
class Guidance(Protocol):
    """Which passes of the model a step takes, by name, and what is made of them."""

    def passes(self, condition: Condition) -> tuple[tuple[str, Condition], ...]: ...

    def combined(self, predicted: Sequence[Float[Tensor, "*s"]]) -> Float[Tensor, "*s"]: ...


@dataclass(frozen=True, slots=True)
class ClassifierFree:
    """Away from `against` (no text, or what is not wanted), by `scale`; a scale of 1 is the text alone, in one pass."""

    against: Condition
    scale: float = 5.0

    def passes(self, condition: Condition) -> tuple[tuple[str, Condition], ...]:
        """See `Guidance`."""
        with_text = ("cond", condition)
        return (with_text,) if self.scale == 1 else (with_text, ("uncond", self.against))

    def combined(self, predicted: Sequence[Float[Tensor, "*s"]]) -> Float[Tensor, "*s"]:
        """See `Guidance`."""
        if self.scale == 1:
            return predicted[0]
        with_text, without = predicted
        return without + self.scale * (with_text - without)


@dataclass(frozen=True, slots=True)
class Distilled:
    """One pass with the text."""

    def passes(self, condition: Condition) -> tuple[tuple[str, Condition], ...]:
        """See `Guidance`."""
        return (("cond", condition),)

    def combined(self, predicted: Sequence[Float[Tensor, "*s"]]) -> Float[Tensor, "*s"]:
        """See `Guidance`."""
        return predicted[0]


def scale_of(guidance: object) -> float | None:
    """How far a call goes, none where that is left to the model. Raises InputError for what is no number that one can go."""
    if guidance is not None and (isinstance(guidance, bool) or not isinstance(guidance, int | float) or not abs(guidance) < 1e6):
        raise InputError(f"it is {shown(guidance)}, expected a number", item="guidance")
    return None if guidance is None else float(guidance)
