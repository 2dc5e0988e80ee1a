"""Normalisation of states and actions, both ways by one pair of numbers, so that what goes in comes out.

lerobot's modes: mean_std (x - mean) / (std + eps); min_max, quantiles (1 % and 99 %) and quantile10 (10 % and 90 %)
2 (x - low) / (high - low + eps) - 1; identity. openpi uses mean_std (pi0) and quantiles (pi0.5, FAST) with eps 1e-6. Upstream the way back
leaves eps out; here it does not. A number that never changed in training (by no more than eps) is only shifted, not divided by eps.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mmsdk.errors import ModelError
from mmsdk.vla.statistics import Statistics, masked

__all__ = ["NEEDS", "Mode", "Normalizer", "missing"]

Mode = Literal["identity", "mean_std", "min_max", "quantiles", "quantile10"]

NEEDS: dict[str, tuple[str, ...]] = {
    "identity": (),
    "mean_std": ("mean", "std"),
    "min_max": ("min", "max"),
    "quantiles": ("q01", "q99"),
    "quantile10": ("q10", "q90"),
}
"""Which statistics each mode needs."""


def missing(mode: Mode, statistics: Statistics) -> list[str]:
    """The statistics that a mode needs and that are not there, or are not finite."""
    return [name for name in NEEDS[mode] if name not in statistics or not bool(statistics[name].isfinite().all())]


@dataclass(frozen=True, slots=True)
class Normalizer:
    """z = (x - offset) / scale + shift, number by number."""

    offset: Float[Tensor, " n"]
    scale: Float[Tensor, " n"]
    shift: Float[Tensor, " n"]

    @classmethod
    def of(cls, mode: Mode, statistics: Statistics, plain: Bool[Tensor, " n"], eps: float = 1e-8, item: str = "features") -> "Normalizer":
        """The normaliser of a mode. Numbers for which `plain` is True stay as they are, and those that the statistics' own mask leaves out
        (OpenVLA's grippers).

        Raises ModelError where statistics are missing or not finite, or are not one number for each of n.
        """
        lacking = missing(mode, statistics)
        if lacking:
            told = f"{item}: {mode} needs {', '.join(NEEDS[mode])}; missing or not finite: {', '.join(lacking)}"
            raise ModelError(f"{told}. Nothing is passed through in silence: give them, or declare the mode identity")
        zeros, ones = torch.zeros(plain.shape[0], dtype=torch.float64), torch.ones(plain.shape[0], dtype=torch.float64)
        if mode == "identity":
            return cls(zeros, ones, zeros)
        first, second = (statistics[name].double() for name in NEEDS[mode])
        if first.shape != plain.shape or second.shape != plain.shape:
            raise ModelError(f"{item}: statistics of {first.shape[0]} and {second.shape[0]} numbers for {plain.shape[0]}")
        left = masked(statistics, plain.shape[0])
        if left.shape != plain.shape:
            raise ModelError(f"{item}: a mask of {left.shape[0]} numbers for {plain.shape[0]}")
        plain = plain | left
        width = second if mode == "mean_std" else second - first
        scale = torch.where(width <= eps, ones, width + eps) / (1 if mode == "mean_std" else 2)
        shift = zeros if mode == "mean_std" else -ones
        return cls(torch.where(plain, zeros, first), torch.where(plain, ones, scale), torch.where(plain, zeros, shift))

    def __call__(self, values: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
        """Normalised values, computed in double precision, in the dtype of the values."""
        return ((values.double() - self.offset) / self.scale + self.shift).to(values.dtype)

    def inverse(self, values: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
        """The way back, exactly."""
        return ((values.double() - self.shift) * self.scale + self.offset).to(values.dtype)
