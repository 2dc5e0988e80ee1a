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

__all__ = ["Filter", "Levels", "cropped", "framed", "resized", "squared"]

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


def resized(pixels: UInt8[Tensor, "f 3 h w"], size: tuple[int, int], by: Filter) -> UInt8[Tensor, "f 3 y x"]:
    """Frames of (height, width) `size`, each resized by Pillow on the processor; the very same where they have that size."""
    if tuple(pixels.shape[-2:]) == size:
        return pixels
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
    """Pixels in the middle of a square of their longer side."""
    height, width = pixels.shape[-2:]
    side = max(height, width)
    return framed(pixels, (side, side), ((side - height) // 2, (side - width) // 2), colour)
