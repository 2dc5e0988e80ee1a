"""Tiles whose patches are joined, so many a side, into one token (pixel shuffle, arXiv 1609.05158): Idefics3, SmolVLM and InternVL.

A picture is cut into tiles of one size, and looked at once more as a whole; each view gives the same small square of tokens. On the grid of
an input a view is a step of time, so that tokens stay with their tile, and tiles with their picture.

Letters: v views, n patches of a view, m tokens of it, s patches joined a side, d width of a patch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional as F

from mmsdk.vision.cells import cells_of
from mmsdk.vision.merged import Merged, together
from mmsdk.vision.pixels import Filter, Levels, resized
from mmsdk.vision.shorten import Area, Shortened
from mmsdk.vision.tiled import Viewed
from mmsdk.vision.types import Media, Video, VisualTokens

__all__ = ["Canvas", "Shuffled", "Splitting", "Tiling", "joined"]

# What the image processors of Idefics3 and SmolVLM never go beyond, in pixels.
_LONGEST = 4096


@runtime_checkable
class Tiling(Protocol):
    """How a picture is cut into views."""

    def shape(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the tiles of a picture of (height, width) pixels; (0, 0) where it is seen as a whole only."""
        ...

    def cut(self, pixels: UInt8[Tensor, "3 h w"]) -> Float[Tensor, "v 3 y x"]:
        """The tiles of a picture and the whole of it, normalised."""
        ...

    def whole(self, frames: UInt8[Tensor, "f 3 h w"]) -> Float[Tensor, "f 3 y x"]:
        """Frames of a clip, each as a whole."""
        ...


@dataclass(frozen=True, slots=True)
class Shuffled:
    """`Views` whose patches, `cells` x `cells` in each, are joined `factor` x `factor` into tokens `width` wide."""

    tiling: Tiling
    cells: int
    factor: int
    width: int

    @property
    def side(self) -> int:
        """Rows and columns of a view's tokens."""
        return self.cells // self.factor

    def views(self, size: tuple[int, int]) -> int:
        """How many views a picture of (height, width) pixels has."""
        rows, columns = self.tiling.shape(size)
        return rows * columns + 1

    def count(self, size: tuple[int, int], frames: int) -> int:
        """See `mmsdk.vision.tiled.Views`."""
        return (frames or self.views(size)) * self.side**2

    def cut(self, item: Media) -> Float[Tensor, "v 3 y x"]:
        """See `mmsdk.vision.tiled.Views`."""
        return self.tiling.whole(item.frames) if isinstance(item, Video) else self.tiling.cut(item.pixels)

    def areas(self, size: tuple[int, int], frames: int) -> list[Area]:
        """See `mmsdk.vision.tiled.Views`: what is joined into one token merges as one."""
        return [Area(0, self.cells, 0, self.cells, self.factor)] * (frames or self.views(size))

    def merged(self, item: Media, views: Sequence[Merged]) -> Shortened:
        """See `mmsdk.vision.tiled.Views`."""
        grid, device = (len(views), self.side, self.side), views[0].features.device
        patches = [replace(view, weight=view.weight * self.factor**2) for view in views]
        places = [F.pad(view.places, (1, 0), value=number) for number, view in enumerate(views)]
        return together(patches, places, [cells_of(grid, device)], grid, _times(item, len(views)))

    def tokens(self, item: Media, viewed: Viewed) -> VisualTokens:
        """See `mmsdk.vision.tiled.Views`; saliency and keys are the means of the patches of a token."""
        features = joined(viewed.features, self.factor).flatten(0, 1)
        saliency, keys = (_mean(x, self.factor) for x in (viewed.saliency[..., None], viewed.keys))
        views, device = len(viewed.features), features.device
        grid, times = (views, self.side, self.side), _times(item, views).to(device)
        weight = torch.full((len(features),), float(self.factor**2), device=device)
        return VisualTokens(features, cells_of(grid, device), weight, grid, times, saliency[:, 0], keys)


def _times(item: Media, views: int) -> Float[Tensor, " v"]:
    return item.times if isinstance(item, Video) else torch.zeros(views)


def joined(views: Float[Tensor, "v n d"], factor: int) -> Float[Tensor, "v m e"]:
    """Patches of a square view joined into tokens, row by row within each: n = m s^2, e = d s^2."""
    cells = math.isqrt(views.shape[1])
    grid = views.unflatten(1, (cells // factor, factor, cells // factor, factor))
    tokens: Tensor = grid.transpose(2, 3).flatten(3).flatten(1, 2)
    return tokens


def _mean(x: Float[Tensor, "v n d"], factor: int) -> Float[Tensor, "m d"]:
    patches = joined(x, factor).unflatten(2, (factor**2, -1))
    means: Tensor = patches.float().mean(dim=2).to(x.dtype).flatten(0, 1)
    return means


@dataclass(frozen=True, slots=True)
class Splitting:
    """Tiles of Idefics3 and SmolVLM, `side` pixels wide: the longer side of a picture is brought to `longest`, then both to whole tiles.

    Tiles come first, the whole last. Without `split` there is the whole alone. The longer side of a clip's frames is first brought to
    `moving`.
    """

    side: int
    longest: int
    moving: int
    split: bool
    by: Filter
    levels: Levels

    def shape(self, size: tuple[int, int]) -> tuple[int, int]:
        """See `Tiling`."""
        height, width = self._tiles(_brought(size, self.longest))
        rows, columns = height // self.side, width // self.side
        return (rows, columns) if self.split and rows * columns > 1 else (0, 0)

    def cut(self, pixels: UInt8[Tensor, "3 h w"]) -> Float[Tensor, "v 3 y x"]:
        """See `Tiling`."""
        height, width = pixels.shape[-2:]
        first = resized(pixels[None], _brought((height, width), self.longest), self.by)
        if not self.split:
            return self.levels(resized(first, (self.side, self.side), self.by))
        plane = resized(first, self._tiles((first.shape[-2], first.shape[-1])), self.by)
        tiles = plane[0].unflatten(1, (-1, self.side)).unflatten(3, (-1, self.side)).permute(1, 3, 0, 2, 4).flatten(0, 1)
        return self.levels(torch.cat([tiles, resized(plane, (self.side, self.side), self.by)]) if len(tiles) > 1 else tiles)

    def whole(self, frames: UInt8[Tensor, "f 3 h w"]) -> Float[Tensor, "f 3 y x"]:
        """See `Tiling`."""
        height, width = frames.shape[-2:]
        # one at a time: on the way a frame is larger than it was
        first = (resized(frame[None], _brought((height, width), self.moving), self.by) for frame in frames)
        return self.levels(torch.cat([resized(frame, (self.side, self.side), self.by) for frame in first]))

    def _tiles(self, size: tuple[int, int]) -> tuple[int, int]:
        """Both sides as whole tiles, the longer one first and the other in proportion to it."""
        height, width = size
        if width >= height:
            wide = -(-width // self.side) * self.side
            return math.ceil(int(wide / (width / height)) / self.side) * self.side, wide
        tall = -(-height // self.side) * self.side
        return tall, math.ceil(int(tall * (width / height)) / self.side) * self.side


def _brought(size: tuple[int, int], longest: int) -> tuple[int, int]:
    """The longer side at `longest`, the other in proportion and even; neither beyond the most there is."""
    height, width = _proportional(size, longest)
    # the longer side is what settings say, even or not
    even = (height + height % 2, width) if size[1] >= size[0] else (height, width + width % 2)
    tall, wide = max(even[0], 1), max(even[1], 1)
    if max(tall, wide) <= _LONGEST:
        return tall, wide
    height, width = _proportional((tall, wide), _LONGEST)
    return max(height, 1), max(width, 1)


def _proportional(size: tuple[int, int], longest: int) -> tuple[int, int]:
    """The longer side at `longest`, the other rounded down."""
    height, width = size
    return (int(longest / (width / height)), longest) if width >= height else (longest, int(longest * (width / height)))


@dataclass(frozen=True, slots=True)
class Canvas:
    """Tiles of InternVL, of (height, width) `size`: from `least` to `most` of them, in the rows and columns nearest to a picture's shape.

    Tiles come first, and the whole last, unless one tile is all.
    """

    size: tuple[int, int]
    least: int
    most: int
    by: Filter
    levels: Levels

    def shape(self, size: tuple[int, int]) -> tuple[int, int]:
        """See `Tiling`."""
        rows, columns = self._best(size)
        return (rows, columns) if rows * columns > 1 else (0, 0)

    def cut(self, pixels: UInt8[Tensor, "3 h w"]) -> Float[Tensor, "v 3 y x"]:
        """See `Tiling`."""
        height, width = pixels.shape[-2:]
        rows, columns = self._best((height, width))
        plane = resized(pixels[None], (rows * self.size[0], columns * self.size[1]), self.by)[0]
        tiles = plane.unflatten(1, (rows, -1)).unflatten(3, (columns, -1)).permute(1, 3, 0, 2, 4).flatten(0, 1)
        return self.levels(torch.cat([tiles, resized(pixels[None], self.size, self.by)]) if len(tiles) > 1 else tiles)

    def whole(self, frames: UInt8[Tensor, "f 3 h w"]) -> Float[Tensor, "f 3 y x"]:
        """See `Tiling`."""
        return self.levels(resized(frames, self.size, self.by))

    def _best(self, size: tuple[int, int]) -> tuple[int, int]:
        """Of the shapes nearest in aspect, the first; a later and larger one where the picture fills more than half of it."""
        height, width = size
        nearest, best = math.inf, (1, 1)
        for columns, rows in _shapes(self.least, self.most):
            away = abs(width / height - columns / rows)
            filled = width * height > 0.5 * self.size[0] * self.size[1] * columns * rows
            if away < nearest or (away == nearest and filled):
                nearest, best = away, (rows, columns)
        return best


@lru_cache(maxsize=16)
def _shapes(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """All (columns, rows) of so many tiles, fewer first, then in the order of columns."""
    shapes = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most + 1) if least <= columns * rows <= most]
    return tuple(sorted(shapes, key=lambda shape: shape[0] * shape[1]))
