"""What reads a clip's container: told the times of all frames first, then asked for a few of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from mmsdk.vision.intake.limits import Limits
from mmsdk.vision.intake.source import Encoded

__all__ = ["RATE", "SAME", "Open", "Reader"]

RATE = 25.0
"""Frames a second of a stream that tells neither times nor a rate: FFmpeg's own assumption."""

SAME = 1e-4
"""Times this near, in seconds, are of the same frame."""


@runtime_checkable
class Reader(Protocol):
    """A clip that is read twice: for the times of its frames, without decoding, and for the frames that are wanted."""

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels, as the header says."""
        ...

    @property
    def cut(self) -> bool:
        """Whether the file ends before its last frame; known after `starts`."""
        ...

    def starts(self) -> npt.NDArray[np.float64]:
        """The second at which each frame is shown, rising from 0. Raises InputError above `Limits.frames`."""
        ...

    def frames(self, starts: Sequence[float]) -> Iterator[tuple[float, npt.NDArray[np.uint8]]]:
        """The frames (h w 3, or 4 with alpha) shown at these rising times, from `starts`, each with its own time.

        In place of a frame that does not decode comes the next that does, once, or none: what comes is never a copy of an earlier one.
        """
        ...


Open = Callable[[Encoded, Limits], AbstractContextManager[Reader]]
"""Opens a reader for the time of a `with`; raises InputError for what it cannot read."""
