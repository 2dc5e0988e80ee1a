"""The sizes that Qwen's vision towers see pictures and clips at: whole patches, near the true aspect, within a number of pixels.

Published with the models: each side becomes the nearest multiple of `factor` (halves to even); where the area is then outside of its
limits, both sides are scaled by one number and rounded down, or up. Qwen3-VL limits the pixels of all frames of a clip together.
The only place of rounding: the prompt, the tower and the count of tokens all ask here.
"""

import math
from dataclasses import dataclass

from jaxtyping import Float, UInt8
from torch import Tensor

from mmsdk.vision.pixels import Filter, Levels, check_long, resized

__all__ = ["SmartResize"]


@dataclass(frozen=True, slots=True)
class SmartResize:
    """Patches of `patch` pixels, of which `merge` x `merge` become a token; an area of `least` to `most` pixels.

    With `together` the limits are those of all frames, which are taken `time` at once. `tokens` above 0 caps a frame's share: to so many
    tokens, or, where frames have their limits each, of the tokens that all may have.
    """

    least: int
    most: int
    patch: int = 14
    merge: int = 2
    time: int = 2
    together: bool = False
    tokens: int = 0
    by: Filter = "bicubic"
    levels: Levels = Levels()

    @property
    def factor(self) -> int:
        """What both sides are multiples of, in pixels."""
        return self.patch * self.merge

    def grid(self, size: tuple[int, int], frames: int = 1) -> tuple[int, int]:
        """(rows, columns) of patches, multiples of `merge`, for an input of (height, width) pixels.

        Raises InputError where one side is more than 200 times the other.
        """
        height, width = size
        check_long(height, width)
        if self.together and min(size) < self.factor:
            scale = max(self.factor / height, self.factor / width)
            height, width = int(height * scale), int(width * scale)
        rows, columns = (round(side / self.factor) for side in (height, width))
        # all frames together count as they are and are rounded to whole steps, each by itself counts once
        count = max(frames, self.time) if self.together else 1
        whole = round(count / self.time) * self.time if self.together else 1
        area, most = rows * columns * self.factor**2 * whole, self._most(max(frames, self.time))
        if area > most:
            scale = math.sqrt(count * height * width / most)
            rows, columns = (max(1, math.floor(side / scale / self.factor)) for side in (height, width))
        elif area < self.least:
            scale = math.sqrt(self.least / (count * height * width))
            rows, columns = (math.ceil(side * scale / self.factor) for side in (height, width))
        return rows * self.merge, columns * self.merge

    def __call__(self, pixels: UInt8[Tensor, "f 3 h w"], grid: tuple[int, int]) -> Float[Tensor, "f 3 y x"]:
        """Resized to a grid of patches, and brought to the model's scale."""
        return self.levels(resized(pixels, (grid[0] * self.patch, grid[1] * self.patch), self.by))

    def _most(self, frames: int) -> int:
        """The largest area, of all frames or of each."""
        if not self.tokens:
            return self.most
        floor = int(self.least * 1.05)
        if self.together:
            return max(min(self.tokens * self.factor**2, self.most // frames), floor) * frames
        return max(min(self.most, int(self.tokens * self.factor**2 * 0.9) * self.time // frames), floor)
