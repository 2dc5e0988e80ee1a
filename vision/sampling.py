"""Which frames of a clip are looked at: chosen by their times, before a single frame is decoded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmsdk.errors import InputError
from mmsdk.vision.values import real, shown

__all__ = ["Sampling"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How many frames to take: `frames` spread over the clip, `fps` of them for each second, or `fps` but at most `frames`.

    `frames` takes what is shown in the middle of as many equal parts of the clip, and every frame of a clip that has no more. `fps`
    takes what is shown at 0, 1/fps, 2/fps ... seconds, and may be a fraction; where that is more than `frames`, `frames` decides.
    """

    frames: int | None = None
    fps: float | None = None

    def __post_init__(self) -> None:
        if self.frames is None and self.fps is None:
            raise InputError("give one of the two: Sampling(frames=8) or Sampling(fps=2.0)", item="sampling")
        if self.frames is not None and not (real(self.frames) >= 1 and real(self.frames).is_integer()):
            raise InputError(f"frames is {shown(self.frames)}, expected a whole number of at least 1", item="sampling")
        if self.fps is not None and not 0 < real(self.fps) < math.inf:
            raise InputError(f"fps is {shown(self.fps)}, expected a number above 0", item="sampling")

    def chosen(self, starts: Sequence[float] | npt.NDArray[np.float64], length: float | None = None) -> list[int]:
        """The frames taken of a clip whose frames are shown from `starts` (seconds, strictly rising) on: strictly rising indices.

        `length` is the clip's in seconds; without it, the last frame is shown as long as the frames before it, by their median.
        """
        begins = np.asarray(starts, np.float64)
        if len(begins) < 2:
            return list(range(len(begins)))
        begins = begins - begins[0]
        gap = float(np.median(np.diff(begins)))
        end = max(float(begins[-1]) + gap if length is None else length, float(begins[-1]))
        # a frame is shown until the next one; the small step forward undoes the rounding of exact ratios
        at = begins - 1e-4 * gap
        if self.fps is not None:
            rate = float(self.fps)
            # the small step back keeps a clip of exactly 2 s at 1 fps from gaining a third frame by rounding
            number = max(1, math.ceil(min(end * rate, len(begins)) - 1e-6))
            by_rate = range(len(begins)) if number >= len(begins) else np.unique(_shown(at, np.arange(number) / rate)).tolist()
            if self.frames is None or len(by_rate) <= self.frames:
                return list(by_rate)
        assert self.frames is not None
        return _spread(at, end, min(int(self.frames), len(begins)))

    def indices(self, count: int, rate: float) -> list[int]:
        """The frames taken of a clip of `count` frames at a constant `rate` frames a second."""
        return self.chosen(np.arange(count) / rate, count / rate)


def _shown(starts: npt.NDArray[np.float64], times: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The frame that is on show at each time."""
    return np.maximum(np.searchsorted(starts, times, side="right") - 1, 0)


def _spread(starts: npt.NDArray[np.float64], end: float, number: int) -> list[int]:
    """Exactly `number` frames, on show in the middle of as many equal parts; where one frame fills several, its neighbours follow."""
    order = np.arange(number)
    middles = _shown(starts, (order + 0.5) * end / number)
    rising = np.maximum.accumulate(middles - order) + order
    spread: list[int] = np.minimum(rising, len(starts) - number + order).tolist()
    return spread
