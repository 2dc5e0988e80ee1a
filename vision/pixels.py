"""What published image processors are made of: resizing by Pillow's filters, padding, cropping, and bringing bytes to a model's scale.

Models react to the last bit of a pixel where their answer hangs in the balance, so that a picture is resized by the very filter that the
checkpoint names. Letters: f frames, h height, w width, y and x the same afterwards.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from mmsdk.errors import InputError

__all__ = ["LONGEST", "Filter", "Levels", "check_long", "check_resized", "cropped", "framed", "resized", "squared"]

LONGEST = 200
"""How many times the other one side of a picture may be, where what is made of it grows with that: as Qwen2-VL has it."""

# Of one frame while it is resized, four bytes each; a picture of as many pixels as are decoded may become nearly three times as large.
_MOST = 2**28

Filter = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]
"""Pillow's resampling filters, in the order of their numbers."""

_FILTERS: Mapping[Filter, Image.Resampling] = MappingProxyType(
    {
        "nearest": Image.Resampling.NEAREST,
        "lanczos": Image.Resampling.LANCZOS,
        "bilinear": Image.Resampling.BILINEAR,
        "bicubic": Image.Resampling.BICUBIC,
        "box": Image.Resampling.BOX,
        "hamming": Image.Resampling.HAMMING,
    }
)


@dataclass(frozen=True, slots=True)
class Levels:
    """Bytes to numbers: times `factor`, less `mean`, over `std`, each channel by itself."""

    factor: float = 1 / 255
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)

    def __call__(self, pixels: UInt8[Tensor, "*f 3 h w"]) -> Float[Tensor, "*f 3 h w"]:
        """In float32, the product rounded from float64, as checkpoints were trained."""
        mean, std = (torch.tensor(values, device=pixels.device)[:, None, None] for values in (self.mean, self.std))
        return ((pixels.double() * self.factor).float() - mean) / std


def check_long(height: int, width: int) -> None:
    """Raise InputError where one side is more than `LONGEST` times the other."""
    if max(height, width) > LONGEST * min(height, width):
        raise InputError(f"is {width}x{height}; one side may be at most {LONGEST} times the other", item="pixels")


def check_resized(size: tuple[int, int], to: tuple[int, int]) -> None:
    """Raise InputError where a picture of (height, width) `size` on its way `to` another, or there, is larger than memory is taken for.

    Rows are resized first, so that it is once as high as it was and as wide as it will be; the weights of a filter, several for each
    pixel of a side, count as 16 pixels of it.
    """
    most = max(max(size[0], to[0]) * to[1], 16 * max(size))
    if most > _MOST:
        told = f"is {size[1]}x{size[0]}, and {most:,} pixels on the way to {to[1]}x{to[0]}, but at most {_MOST:,} are taken memory for"
        raise InputError(f"{told}; cut it, or make it smaller", item="pixels")


def resized(pixels: UInt8[Tensor, "f 3 h w"], size: tuple[int, int], by: Filter) -> UInt8[Tensor, "f 3 y x"]:
    """Frames of (height, width) `size`, each resized by Pillow on the processor; the very same where they have that size.

    Raises InputError as `check_resized` does.
    """
    if tuple(pixels.shape[-2:]) == size:
        return pixels
    check_resized((pixels.shape[-2], pixels.shape[-1]), size)
    frames = pixels.permute(0, 2, 3, 1).cpu().numpy()
    done = [np.asarray(Image.fromarray(frame).resize((size[1], size[0]), _FILTERS[by])) for frame in np.ascontiguousarray(frames)]
    return torch.from_numpy(np.stack(done)).permute(0, 3, 1, 2).to(pixels.device)


def cropped(pixels: UInt8[Tensor, "*f 3 h w"], size: tuple[int, int]) -> UInt8[Tensor, "*f 3 y x"]:
    """The middle of (height, width) `size`; what is smaller stands in black."""
    height, width = pixels.shape[-2:]
    tall, wide = max(height, size[0]), max(width, size[1])
    top, left = -((height - tall) // 2), -((width - wide) // 2)
    around = framed(pixels, (tall, wide), (top, left))
    start_y, start_x = (height - size[0]) // 2 + top, (width - size[1]) // 2 + left
    return around[..., start_y : start_y + size[0], start_x : start_x + size[1]]


def framed(
    pixels: UInt8[Tensor, "*f 3 h w"], size: tuple[int, int], at: tuple[int, int], colour: tuple[int, int, int] = (0, 0, 0)
) -> UInt8[Tensor, "*f 3 y x"]:
    """Pixels on a ground of (height, width) `size` and this colour, their upper left corner at (row, column) `at`."""
    height, width = pixels.shape[-2:]
    if (height, width) == size:
        return pixels
    ground = torch.tensor(colour, dtype=pixels.dtype, device=pixels.device)[:, None, None]
    ground = ground.expand(*pixels.shape[:-2], *size).contiguous()
    ground[..., at[0] : at[0] + height, at[1] : at[1] + width] = pixels
    return ground


def squared(pixels: UInt8[Tensor, "*f 3 h w"], colour: tuple[int, int, int]) -> UInt8[Tensor, "*f 3 s s"]:
    """Pixels in the middle of a square of their longer side. Raises InputError where that is larger than memory is taken for."""
    height, width = pixels.shape[-2:]
    side = max(height, width)
    check_resized((height, width), (side, side))
    return framed(pixels, (side, side), ((side - height) // 2, (side - width) // 2), colour)
