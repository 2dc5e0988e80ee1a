"""Pictures of one size for all: resized, its middle cut out, brought to a model's scale, as image processors of CLIP's family do.

Settings are a checkpoint's own. The whole picture gives one square of patches, whatever its shape.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mmsdk.vision.pixels import Filter, Levels, check_long, cropped, resized, squared

__all__ = ["Prepare"]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Resized so that the shorter side is `short`, or to `size` where that is 0; then the middle of `size` (height, width) pixels.

    `square` puts a picture in the middle of a square first, on the colour that is the mean of `levels`. `patch` is the encoder's.
    """

    patch: int
    size: tuple[int, int]
    short: int = 0
    by: Filter = "bicubic"
    levels: Levels = Levels()
    square: bool = False

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of patches, for every input alike."""
        return self.size[0] // self.patch, self.size[1] // self.patch

    def __call__(self, pixels: UInt8[Tensor, "f 3 h w"]) -> Float[Tensor, "f 3 y x"]:
        """Frames of one size, one after another: what a frame is on the way may be much larger than it was and will be.

        Raises InputError where that would be too large, as it is where one side is more than 200 times the other, by which it then grows.
        """
        height, width = pixels.shape[-2:]
        if self.short or self.square:
            check_long(height, width)
        return self.levels(torch.cat([self._frame(frame[None]) for frame in pixels]))

    def _frame(self, pixels: UInt8[Tensor, "1 3 h w"]) -> UInt8[Tensor, "1 3 y x"]:
        if self.square:
            red, green, blue = (int(255 * mean) for mean in self.levels.mean)
            pixels = squared(pixels, (red, green, blue))
        height, width = pixels.shape[-2:]
        return cropped(resized(pixels, self._target(height, width), self.by), self.size)

    def _target(self, height: int, width: int) -> tuple[int, int]:
        if not self.short:
            return self.size
        long = int(self.short * max(height, width) / min(height, width))
        return (self.short, long) if height <= width else (long, self.short)
