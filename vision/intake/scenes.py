"""Where one scene of a clip ends and the next begins: how much each frame differs from the one before it.

The score is that of FFmpeg's filter `select` (its documentation tells of it as `scene`): with m the mean absolute difference of brightness
between two frames, in levels of 256, and m' that of the two before, min(m, |m - m'|) / 100, at most 1. Taking the smaller of both leaves
out what goes on moving and counts a flash once. Scored are small copies, 64 x 64, of one frame at a time: memory is bounded however long
the clip is, but all of it is decoded.
"""

from collections.abc import Iterable
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from mmsdk.vision.intake.reader import SAME

__all__ = ["changes"]

SIDE = 64
FULL = 100.0


def changes(frames: Iterable[tuple[float, npt.NDArray[Any]]], starts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The score of the frame at each of `starts`, from 0 to 1; 0 for the first, and for those that do not come.

    `frames` are pictures (h w 3, uint8), each with its time, which is one of `starts`.
    """
    scores = np.zeros(len(starts))
    last, moved = np.empty(0), 0.0
    for time, pixels in frames:
        small = _small(pixels)
        if last.size:
            before, moved = moved, float(np.abs(small - last).mean())
            scores[min(int(np.searchsorted(starts, time - SAME)), len(starts) - 1)] = min(moved, abs(moved - before), FULL) / FULL
        last = small
    return scores


def _small(pixels: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    resized = cv2.resize(np.ascontiguousarray(pixels), (SIDE, SIDE), interpolation=cv2.INTER_AREA)
    return np.asarray(cv2.cvtColor(resized, cv2.COLOR_RGB2GRAY), np.float64)
