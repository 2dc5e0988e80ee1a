"""The steps of flow matching from noise to a clip, by Euler's method.

Flow Matching (arXiv 2210.02747) and Scaling Rectified Flow Transformers (arXiv 2403.03206), where the shift towards noise comes from.
Latents at sigma are (1 - sigma) x + sigma noise, and the model predicts noise - x. Sigmas are those of diffusers'
FlowMatchEulerDiscreteScheduler.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError

__all__ = ["Schedule", "evenly", "flow", "flow_by_length", "grown_shift"]

_TRAINED = 1000


@dataclass(frozen=True, slots=True)
class Schedule:
    """How noisy latents are before each step, falling, and 0 at the end."""

    sigmas: tuple[float, ...]

    def __post_init__(self) -> None:
        falling = all(high > low for high, low in zip(self.sigmas, self.sigmas[1:], strict=False))
        if not self.sigmas or not falling or self.sigmas[-1] != 0 or self.sigmas[0] > 1:
            raise InputError(f"{self.sigmas} is no schedule: it falls from at most 1 to 0", item="sigmas")

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return len(self.sigmas) - 1

    def time(self, step: int) -> float:
        """What the model is told of a step."""
        return self.sigmas[step] * _TRAINED

    def step(self, latents: Float[Tensor, "*s"], velocity: Float[Tensor, "*s"], number: int) -> Float[Tensor, "*s"]:
        """One of Euler's steps, in float32; the dtype is that of the velocity."""
        return (latents.float() + (self.sigmas[number + 1] - self.sigmas[number]) * velocity).to(velocity.dtype)

    def clean(self, latents: Float[Tensor, "*s"], velocity: Float[Tensor, "*s"], number: int) -> Float[Tensor, "*s"]:
        """The clip that a step expects at the end."""
        return (latents.float() - self.sigmas[number] * velocity).to(velocity.dtype)

    def last(self, steps: int) -> "Schedule":
        """Only the last steps. Raises InputError where there are not so many."""
        if not 0 <= steps <= self.steps:
            raise InputError(f"{steps} of {self.steps} steps cannot be taken", item="steps")
        return Schedule(self.sigmas[self.steps - steps :])


def flow(steps: int, shift: float = 1.0) -> Schedule:
    """Even sigmas, shifted: shift s / (1 + (shift - 1) s). A larger shift spends more steps where there is more noise."""
    _check(steps, shift)
    # The smallest sigma of the training is shifted, too, before steps are laid between it and 1.
    least = _shifted(torch.tensor(1 / _TRAINED, dtype=torch.float64), shift)
    return _ending(_shifted(torch.linspace(1, float(least), steps, dtype=torch.float64), shift))


def evenly(steps: int, shift: float = 1.0) -> Schedule:
    """Even sigmas from 1 by equal parts, then shifted: those that HunyuanVideo's pipeline hands to its scheduler."""
    _check(steps, shift)
    return _ending(_shifted(torch.linspace(1, 1 / steps, steps, dtype=torch.float64), shift))


def flow_by_length(steps: int, tokens: int, terminal: float | None = None) -> Schedule:
    """Sigmas shifted by exp(mu), mu growing with the length from 0.95 at 1,024 tokens to 2.05 at 4,096, as LTX does.

    With `terminal`, sigmas are stretched so that the last one before 0 is that; a single step begins at noise.
    """
    _check(steps, 1.0)
    mu = 0.95 + (2.05 - 0.95) * (tokens - 1024) / (4096 - 1024)
    even = torch.linspace(1, 1 / steps, steps, dtype=torch.float64)
    sigmas = _shifted(even, math.exp(mu))
    if terminal is not None and steps > 1:
        sigmas = 1 - (1 - sigmas) * (1 - terminal) / (1 - sigmas[-1])
    return _ending(sigmas)


def grown_shift(shift: float, tokens: int, known: int) -> float:
    """The shift for `tokens`, where `shift` fits `known`: it goes by the square root of the length (arXiv 2403.03206, section 5.3.2)."""
    return shift * math.sqrt(tokens / known)


def _shifted(sigmas: Tensor, shift: float) -> Tensor:
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def _ending(sigmas: Float[Tensor, " n"]) -> Schedule:
    return Schedule((*sigmas.float().tolist(), 0.0))


def _check(steps: int, shift: float) -> None:
    if steps < 1 or shift <= 0:
        raise InputError(f"{steps} steps with a shift of {shift}; there is at least one step, and a shift is above 0", item="schedule")
