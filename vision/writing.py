"""How much of a picture is writing: lines of letters found by their strokes, without reading them.

Letters are many narrow strokes side by side, in a band that is wider than high with plain paper above and below. What is narrow and darker,
or lighter, than its surroundings is a stroke; strokes are closed along rows, so that the letters of a few words become one piece; a piece
counts when it has the shape of one, is well filled, and is crossed by as many strokes as letters of its height have. Ours; made to
tell pages, forms and screens from photographs, not to find every word.
"""

from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt
from jaxtyping import UInt8
from torch import Tensor

__all__ = ["Writing", "writing"]

# The longer side that is looked at, in pixels: the lines of a page stay apart at this size.
SIDE = 1024
# A stroke is at most so many pixels wide, and so many grey levels from its surroundings.
STROKE, CONTRAST = 13, 28
# Lines are cut into pieces of so many pixels, so that one that is a little askew stays low.
PIECE = 96
# A piece: height in pixels, width in heights, share of its box that is filled, strokes in one height of its width.
LOW, HIGH = 5, 56
WIDE = 1.8
FILLED = 0.35
FEWEST, MOST = 1.2, 8.0

Columns = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Writing:
    """`pieces` of writing, a word or a few, and the `share` of the picture, from 0 to 1, that their boxes take."""

    pieces: int
    share: float

    @property
    def dense(self) -> bool:
        """Whether the picture is about its text: several pieces that take a good part of it."""
        return self.pieces >= 8 and self.share >= 0.15


def writing(pixels: UInt8[Tensor, "3 h w"]) -> Writing:
    """Look for horizontal writing in a picture, dark on light and light on dark; what there is more of counts."""
    grey = _grey(pixels)
    around = np.ones((STROKE, STROKE), np.uint8)
    dark, light = (cv2.morphologyEx(grey, kind, around) > CONTRAST for kind in (cv2.MORPH_BLACKHAT, cv2.MORPH_TOPHAT))
    return max(_pieces(dark), _pieces(light), key=lambda found: found.share)


def _pieces(strokes: npt.NDArray[np.bool_]) -> Writing:
    bands = cv2.morphologyEx(strokes.astype(np.uint8), cv2.MORPH_CLOSE, np.ones((1, 9), np.uint8))
    bands[:, ::PIECE] = 0
    _, _, boxes, _ = cv2.connectedComponentsWithStats(bands, connectivity=4)
    left, top, width, height, area = boxes[1:].T
    shape = (height >= LOW) & (height <= HIGH) & (width >= WIDE * height) & (area >= FILLED * width * height)
    crossed = _crossings(strokes, left, top, width, height) * height / width
    found = shape & (crossed >= FEWEST) & (crossed <= MOST)
    return Writing(int(found.sum()), float((width * height)[found].sum() / strokes.size))


def _crossings(strokes: npt.NDArray[np.bool_], left: Columns, top: Columns, width: Columns, height: Columns) -> npt.NDArray[np.float64]:
    """How many strokes a row of each box crosses, mean over its rows."""
    enters = strokes.astype(np.uint8)
    enters[:, 1:] &= ~strokes[:, :-1]
    total = cv2.integral(enters)
    right, bottom = left + width, top + height
    inside = total[bottom, right] - total[top, right] - total[bottom, left] + total[top, left]
    return np.asarray(inside / height, np.float64)


def _grey(pixels: UInt8[Tensor, "3 h w"]) -> npt.NDArray[np.uint8]:
    """Grey levels, the longer side brought down to SIDE where it is longer."""
    grey = cv2.cvtColor(np.ascontiguousarray(pixels.cpu().numpy().transpose(1, 2, 0)), cv2.COLOR_RGB2GRAY)
    scale = SIDE / max(grey.shape)
    if scale < 1:
        size = max(1, round(grey.shape[1] * scale)), max(1, round(grey.shape[0] * scale))
        grey = cv2.resize(grey, size, interpolation=cv2.INTER_AREA)
    return np.asarray(grey, np.uint8)
