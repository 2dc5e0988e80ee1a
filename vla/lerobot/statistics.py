"""Statistics of a dataset's features: min, max, mean, std and count of each episode, and of all together from those.

Joined as lerobot does, by the parallel form of the variance: var = (sum of n_i (var_i + (mean_i - mean)^2)) / n. Of pictures they are per
channel, in 0..1, of every few pixels; there lerobot looks at some of the frames, here at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["Moments", "Summary", "joined", "summary"]

Numbers = npt.NDArray[np.float64]
Summary = Mapping[str, Numbers]
"""min, max, mean and std of a feature's shape (pictures: 3 1 1), and count, of one number."""

_SIDE = 150


def summary(rows: npt.NDArray[np.generic]) -> dict[str, Numbers]:
    """Of n rows of numbers, n or n d."""
    values = np.asarray(rows, np.float64).reshape(len(rows), -1)
    found = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
    return {**found, "count": np.array([len(rows)], np.float64)}


def joined(parts: Sequence[Summary]) -> dict[str, Numbers]:
    """Of several parts together."""
    counts = np.stack([part["count"] for part in parts]).reshape(-1, *[1] * parts[0]["mean"].ndim)
    means, stds = (np.stack([part[name] for part in parts]) for name in ("mean", "std"))
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    variance = ((stds**2 + (means - mean) ** 2) * counts).sum(0) / total
    low, high = np.stack([part["min"] for part in parts]).min(0), np.stack([part["max"] for part in parts]).max(0)
    return {"min": low, "max": high, "mean": mean, "std": np.sqrt(variance), "count": np.array([total])}


@dataclass(slots=True)
class Moments:
    """The running statistics of a camera's pictures."""

    frames: int = 0
    pixels: int = 0
    low: Numbers = field(default_factory=lambda: np.full(3, np.inf))
    high: Numbers = field(default_factory=lambda: np.full(3, -np.inf))
    total: Numbers = field(default_factory=lambda: np.zeros(3))
    squares: Numbers = field(default_factory=lambda: np.zeros(3))

    def add(self, picture: npt.NDArray[np.uint8]) -> None:
        """Take in a picture h w 3."""
        stride = max(1, min(picture.shape[:2]) // _SIDE)
        values = picture[::stride, ::stride].reshape(-1, 3) / 255.0
        self.frames, self.pixels = self.frames + 1, self.pixels + len(values)
        self.low, self.high = np.minimum(self.low, values.min(0)), np.maximum(self.high, values.max(0))
        self.total, self.squares = self.total + values.sum(0), self.squares + (values**2).sum(0)

    def summary(self) -> dict[str, Numbers]:
        """Of all that were taken in."""
        mean = self.total / self.pixels
        std = np.sqrt(np.maximum(0.0, self.squares / self.pixels - mean**2))
        found = {"min": self.low, "max": self.high, "mean": mean, "std": std}
        return {**{name: value.reshape(3, 1, 1) for name, value in found.items()}, "count": np.array([float(self.frames)])}
