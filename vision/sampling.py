"""Which frames of a clip are looked at: chosen by their times before a single frame is decoded, or one a scene."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmsdk.errors import InputError
from mmsdk.vision.values import real, shown

__all__ = ["Sampling"]

UNSEEN: npt.NDArray[np.float64] = np.empty(0)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which frames: `frames` spread over the clip, `fps` for each second, one of each of its `scenes`, or at most `frames` of these.

    `frames` takes what is shown in the middle of as many equal parts of the clip, and every frame of a clip that has no more. `fps`
    takes what is shown at 0, 1/fps, 2/fps ... seconds, and may be a fraction; where that is more than `frames`, `frames` decides.
    `scenes` takes what is shown in the middle of each scene; a scene begins with a frame whose change from the one before is above this,
    by the score in `mmsdk.vision.intake.scenes` (0.3 finds hard cuts). Where that is more than `frames`, the strongest changes count.
    """

    frames: int | None = None
    fps: float | None = None
    scenes: float | None = None

    def __post_init__(self) -> None:
        if self.frames is None and self.fps is None and self.scenes is None:
            raise InputError("give one of these: Sampling(frames=8), Sampling(fps=2.0) or Sampling(scenes=0.3)", item="sampling")
        if self.fps is not None and self.scenes is not None:
            raise InputError("fps and scenes were given together; a frame is taken by the clock or of a scene", item="sampling")
        if self.frames is not None and not (real(self.frames) >= 1 and real(self.frames).is_integer()):
            raise InputError(f"frames is {shown(self.frames)}, expected a whole number of at least 1", item="sampling")
        if self.fps is not None and not 0 < real(self.fps) < math.inf:
            raise InputError(f"fps is {shown(self.fps)}, expected a number above 0", item="sampling")
        if self.scenes is not None and not 0 < real(self.scenes) < 1:
            raise InputError(f"scenes is {shown(self.scenes)}, expected a number between 0 and 1, such as 0.3", item="sampling")

    def chosen(
        self, starts: Sequence[float] | npt.NDArray[np.float64], length: float | None = None, changes: npt.NDArray[np.float64] = UNSEEN
    ) -> list[int]:
        """The frames taken of a clip whose frames are shown from `starts` (seconds, strictly rising) on: strictly rising indices.

        `length` is the clip's in seconds; without it, the last frame is shown as long as the frames before it, by their median.
        `changes` are the scores of the frames, which are looked at where one of each scene is taken.
        """
        begins = np.asarray(starts, np.float64)
        if len(begins) < 2:
            return list(range(len(begins)))
        begins = begins - begins[0]
        gap = float(np.median(np.diff(begins)))
        end = max(float(begins[-1]) + gap if length is None else length, float(begins[-1]))
        # a frame is shown until the next one; the small step forward undoes the rounding of exact ratios
        at = begins - 1e-4 * gap
        if self.scenes is not None:
            assert len(changes) == len(begins), "the changes are of all frames"
            return _of_scenes(at, begins, end, self._cuts(changes, float(self.scenes)))
        if self.fps is not None:
            rate = float(self.fps)
            # the small step back keeps a clip of exactly 2 s at 1 fps from gaining a third frame by rounding
            number = max(1, math.ceil(min(end * rate, len(begins)) - 1e-6))
            by_rate = range(len(begins)) if number >= len(begins) else np.unique(_shown(at, np.arange(number) / rate)).tolist()
            if self.frames is None or len(by_rate) <= self.frames:
                return list(by_rate)
        assert self.frames is not None
        return _spread(at, end, min(int(self.frames), len(begins)))

    def indices(self, count: int, rate: float, changes: npt.NDArray[np.float64] = UNSEEN) -> list[int]:
        """The frames taken of a clip of `count` frames at a constant `rate` frames a second."""
        return self.chosen(np.arange(count) / rate, count / rate, changes)

    def _cuts(self, changes: npt.NDArray[np.float64], least: float) -> npt.NDArray[np.int64]:
        """The frames that scenes begin with, the first of all left out: those of the strongest changes where there would be too many."""
        found = np.flatnonzero(changes > least)
        if self.frames is None or len(found) < self.frames:
            return found
        strongest = np.argsort(-changes[found], kind="stable")[: int(self.frames) - 1]
        return np.sort(found[strongest])


def _shown(starts: npt.NDArray[np.float64], times: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The frame that is on show at each time."""
    return np.maximum(np.searchsorted(starts, times, side="right") - 1, 0)


def _of_scenes(starts: npt.NDArray[np.float64], begins: npt.NDArray[np.float64], end: float, cuts: npt.NDArray[np.int64]) -> list[int]:
    """What is on show in the middle of each part between two cuts."""
    edges = np.concatenate([[0.0], begins[cuts[cuts > 0]], [end]])
    middles: list[int] = _shown(starts, (edges[:-1] + edges[1:]) / 2).tolist()
    return middles


def _spread(starts: npt.NDArray[np.float64], end: float, number: int) -> list[int]:
    """Exactly `number` frames, on show in the middle of as many equal parts; where one frame fills several, its neighbours follow."""
    order = np.arange(number)
    middles = _shown(starts, (order + 0.5) * end / number)
    rising = np.maximum.accumulate(middles - order) + order
    spread: list[int] = np.minimum(rising, len(starts) - number + order).tolist()
    return spread
