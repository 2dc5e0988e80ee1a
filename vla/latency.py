"""How long things take, told as percentiles; and the delay that real-time chunking plans with."""

from collections import deque
from dataclasses import dataclass, field
from math import ceil

import numpy as np

from mmsdk.errors import InputError

__all__ = ["Delay", "Percentiles", "percentiles"]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a number of measurements the median, the 95th and 99th percentile and the largest, in the measurements' unit; 0 of none."""

    count: int = 0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    largest: float = 0.0


def percentiles(values: "deque[float] | list[float]") -> Percentiles:
    """The percentiles of measurements, interpolated linearly between neighbours as NumPy does."""
    if not values:
        return Percentiles()
    p50, p95, p99 = (float(value) for value in np.percentile(np.fromiter(values, np.float64), (50, 95, 99)))
    return Percentiles(len(values), p50, p95, p99, max(values))


@dataclass(slots=True)
class Delay:
    """How many actions will be executed between an observation and the answer to it, from the last `window` answers.

    Counted in consumed actions, not in seconds: a robot that stood still while it waited executed none. The first answer, slow because
    everything was cold, never enters; old answers leave, so that one slow answer is not paid for ever after.
    """

    window: int = 10
    share: float = 0.95
    _seen: "deque[int]" = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.window < 1 or not 0 < self.share <= 1:
            raise InputError(f"window {self.window} is at least 1, share {self.share} in (0, 1]", item="delay")
        self._seen = deque(maxlen=self.window)

    def add(self, consumed: int) -> None:
        """An answer came after so many actions."""
        self._seen.append(consumed)

    @property
    def estimate(self) -> int:
        """Enough for `share` of the recent answers; 0 before the first."""
        if not self._seen:
            return 0
        ordered = sorted(self._seen)
        return ordered[max(0, ceil(self.share * len(ordered)) - 1)]
