"""From pixels of any size to what a patch encoder takes: one grid of patches, resized and normalised. The only place of rounding."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional as F

from mmsdk.vision.pixels import check_resized

__all__ = ["Preprocess"]

_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True)
class Preprocess:
    """Keeps the aspect ratio: the grid has about `area` patches of `patch` pixels a side, never more, and at least one a side."""

    patch: int = 14
    area: int = 256
    mean: tuple[float, float, float] = _IMAGENET_MEAN
    std: tuple[float, float, float] = _IMAGENET_STD

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of patches for an input of (height, width) pixels.

        Of the grids around the exact one that hold at most `area` patches, the one nearest in aspect; among equals the largest.
        """
        height, width = size
        tall, wide = math.sqrt(self.area * height / width), math.sqrt(self.area * width / height)
        near = [(self._side(rows), self._side(columns)) for rows in _around(tall) for columns in _around(wide)]
        fitting = [(rows, columns) for rows, columns in near if rows * columns <= self.area]
        return min(fitting, key=lambda g: (abs(math.log(g[0] * width / (g[1] * height))), -g[0] * g[1]))

    def _side(self, patches: int) -> int:
        return min(max(1, patches), self.area)

    def __call__(self, pixels: UInt8[Tensor, "*f 3 h w"]) -> Float[Tensor, "*f 3 y x"]:
        """Resize to the grid (bicubic, antialiased), scale to [0, 1], normalise; one picture or any number of frames.

        Raises InputError for one that is so long that resizing it would take too much memory.
        """
        rows, columns = self.grid((pixels.shape[-2], pixels.shape[-1]))
        x = _resized(pixels, (rows * self.patch, columns * self.patch))
        mean, std = (torch.tensor(v, device=x.device).view(3, 1, 1) * 255 for v in (self.mean, self.std))
        return (x - mean) / std


def _around(exact: float) -> tuple[int, int]:
    return math.floor(exact), math.ceil(exact)


def _resized(pixels: UInt8[Tensor, "*f 3 h w"], size: tuple[int, int]) -> Float[Tensor, "*f 3 y x"]:
    if pixels.shape[-2:] == size:
        return pixels.float()
    check_resized((pixels.shape[-2], pixels.shape[-1]), size)
    flat = pixels.reshape(-1, *pixels.shape[-3:])
    # on a CPU, torch resizes bytes as Pillow does but for rounding, and four times as fast as floats; a GPU has floats only
    flat = flat if flat.device.type == "cpu" else flat.float()
    resized = F.interpolate(flat, size, mode="bicubic", align_corners=False, antialias=True).float()
    return resized.round().clamp(0, 255).view(*pixels.shape[:-2], *size)
