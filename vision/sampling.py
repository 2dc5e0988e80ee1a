"""Which frames of a clip are looked at: chosen from the count and the rate, before a single frame is decoded."""

import math
from dataclasses import dataclass

from mmsdk.errors import InputError

__all__ = ["Sampling"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How many frames to take: `frames` spread over the clip, or `fps` of them for each second. Exactly one of the two is given.

    `frames` takes the middle frame of as many equal parts of the clip, and every frame of a clip that has fewer. `fps` takes the frame
    that is shown at 0, 1/fps, 2/fps ... seconds, and may be a fraction.
    """

    frames: int | None = None
    fps: float | None = None

    def __post_init__(self) -> None:
        if (self.frames is None) == (self.fps is None):
            raise InputError("give one of the two: Sampling(frames=8) or Sampling(fps=2.0)", item="sampling")
        if self.frames is not None and self.frames < 1:
            raise InputError(f"frames is {self.frames}, expected at least 1", item="sampling")
        if self.fps is not None and not (math.isfinite(self.fps) and self.fps > 0):
            raise InputError(f"fps is {self.fps}, expected a number above 0", item="sampling")

    def number(self, count: int, rate: float) -> int:
        """How many frames are taken of a clip of `count` frames at `rate` frames a second."""
        if self.frames is not None:
            return min(self.frames, count)
        assert self.fps is not None
        # the small step back keeps a clip of exactly 2 s at 1 fps from gaining a third frame by rounding
        return min(count, max(1, math.ceil(count / rate * self.fps - 1e-6)))

    def indices(self, count: int, rate: float) -> list[int]:
        """The frames taken of a clip of `count` frames at `rate` frames a second, from 0 and strictly increasing."""
        number = self.number(count, rate)
        if self.frames is not None or number == count:
            return [(2 * place + 1) * count // (2 * number) for place in range(number)]
        assert self.fps is not None
        # a frame is shown until the next one, hence the floor; the small step forward undoes the rounding of exact ratios
        return [min(math.floor(place * rate / self.fps + 1e-6), count - 1) for place in range(number)]
