"""Models that were trained with noise of another kind, as flows: latents that keep their variance, a x + b noise with a^2 + b^2 = 1.

Divided by a + b such latents lie on the straight line from the clip to the noise, at sigma = b / (a + b), and a step of DDIM (arXiv
2010.02502) is Euler's step there; so schedules, guidance, caches and two stages work as with any model. The levels are CogVideoX's (arXiv
2408.06072): square roots of betas that rise evenly, a shift of the ratio of signal to noise, and none at the last (arXiv 2305.08891).
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.diffusion.schedule import Schedule
from mmsdk.errors import InputError

__all__ = ["Preserving"]

_LEVELS = 1000


@dataclass(frozen=True, slots=True)
class Preserving:
    """The levels of noise by their settings; `shift` divides the ratio of signal to noise."""

    shift: float = 1.0
    first: float = 0.00085
    last: float = 0.012

    def flow(self, steps: int) -> Schedule:
        """The sigmas of so many steps, each the last level of its share. Raises InputError for no steps, and for more than levels."""
        if not 1 <= steps <= _LEVELS:
            raise InputError(f"it is {steps}, of {_LEVELS} levels of noise", item="steps")
        signal = _signals(self)[(_LEVELS - torch.arange(steps) * (_LEVELS / steps)).round().long() - 1]
        noise = (1 - signal.square()).sqrt()
        return Schedule((*(noise / (signal + noise)).tolist(), 0.0))

    def parts(self, sigma: Float[Tensor, " b"]) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"], Int[Tensor, " b"]]:
        """a and b at a sigma, and the level that is nearest."""
        length = ((1 - sigma).square() + sigma.square()).sqrt()
        signal = (1 - sigma) / length
        level = (_signals(self).to(sigma.device)[:, None] - signal.double()).abs().argmin(0)
        return signal, sigma / length, level


@lru_cache(maxsize=8)
def _signals(levels: Preserving) -> Float[Tensor, " n"]:
    """a of every level, falling to 0; float64."""
    betas = torch.linspace(levels.first**0.5, levels.last**0.5, _LEVELS, dtype=torch.float64).square()
    kept = (1 - betas).cumprod(0)
    signal = (kept / (levels.shift + (1 - levels.shift) * kept)).sqrt()
    return (signal - signal[-1]) * signal[0] / (signal[0] - signal[-1])
