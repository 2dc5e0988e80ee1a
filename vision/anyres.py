"""Pictures of any resolution (LLaVA-NeXT): an overview, and the tiles of the one of several given canvases that wastes least.

A picture is resized to its canvas with its shape kept, in the middle of black, and cut into tiles as large as the vision tower sees. The
patches of all tiles make one plane again, of which only what is picture is kept: first the overview's tokens, then those of the plane,
row by row. On the grid of an input the overview is at time 0, the plane at time 1. The frames of a clip are each seen as an overview.

Letters: v views (the overview first), n patches of a view, r rows and c columns of the plane, d width.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from mmsdk.errors import InputError
from mmsdk.vision.cells import cells_of
from mmsdk.vision.merged import Merged, together
from mmsdk.vision.pixels import Filter, Levels, framed, resized
from mmsdk.vision.prepare import Prepare
from mmsdk.vision.shorten import Area, Shortened
from mmsdk.vision.tiled import Viewed
from mmsdk.vision.types import Media, Video, VisualTokens

__all__ = ["AnyRes", "Canvas", "Shrink", "halved", "pooled"]

Shrink = Callable[[Float[Tensor, "f d g g"]], Float[Tensor, "f d y x"]]
"""What becomes of the planes of a clip's frames."""


@dataclass(frozen=True, slots=True)
class Canvas:
    """The canvases `sizes` (height, width), in tiles `side` pixels wide that the tower sees as `cells` x `cells` patches.

    A plane of the patches of more than `most` tiles is scaled down to about these; 0 sets no limit.
    """

    side: int
    cells: int
    sizes: tuple[tuple[int, int], ...]
    by: Filter
    levels: Levels
    most: int = 0

    def best(self, size: tuple[int, int]) -> tuple[int, int]:
        """The canvas on which most of a picture of (height, width) pixels is left, and of these the one with least waste; the first."""

        def fitting(canvas: tuple[int, int]) -> tuple[int, int]:
            scale = min(canvas[1] / size[1], canvas[0] / size[0])
            left = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
            return left, left - canvas[0] * canvas[1]

        return max(self.sizes, key=fitting)

    def cut(self, pixels: UInt8[Tensor, "3 h w"]) -> Float[Tensor, "v 3 s s"]:
        """The overview, resized whatever its shape, and the tiles of the canvas in reading order."""
        height, width = pixels.shape[-2:]
        canvas = self.best((height, width))
        tall, wide = canvas[0] / height, canvas[1] / width
        if wide < tall:
            size = min(math.ceil(height * wide), canvas[0]), canvas[1]
        else:
            size = canvas[0], min(math.ceil(width * tall), canvas[1])
        if min(size) < 1:
            raise InputError(f"of {width}x{height} pixels is too narrow for a canvas of {canvas[1]}x{canvas[0]}", item="picture")
        middle = (canvas[0] - size[0]) // 2, (canvas[1] - size[1]) // 2
        plane = framed(resized(pixels[None], size, self.by), canvas, middle)[0]
        tiles = plane.unflatten(1, (-1, self.side)).unflatten(3, (-1, self.side)).permute(1, 3, 0, 2, 4).flatten(0, 1)
        return self.levels(torch.cat([resized(pixels[None], (self.side, self.side), self.by), tiles]))

    def detail(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the plane that a picture of (height, width) pixels leaves."""
        return self._scaled(*(kept.stop - kept.start for kept in self._window(size)))

    def plane(self, views: Float[Tensor, "v n d"], size: tuple[int, int]) -> Float[Tensor, "m d"]:
        """What was seen in tiles, side by side again, without what is no picture."""
        canvas, cells = self.best(size), self.cells
        tiles = views.unflatten(0, (canvas[0] // self.side, canvas[1] // self.side)).unflatten(2, (cells, cells))
        rows, columns = self._window(size)
        kept: Tensor = tiles.permute(4, 0, 2, 1, 3).flatten(1, 2).flatten(2, 3)[:, rows, columns]
        wanted = self.detail(size)
        if kept.shape[1:] != wanted:
            kept = F.interpolate(kept[None], wanted, mode="bilinear")[0]
        return kept.flatten(1).T

    def areas(self, size: tuple[int, int]) -> list[Area]:
        """The patches of each tile that are picture, in reading order of tiles; none where a tile is black."""
        (rows, columns), cells = self._window(size), self.cells
        return [
            Area(*_within(rows, top, cells), *_within(columns, left, cells))
            for top in range(0, self.best(size)[0] // self.side * cells, cells)
            for left in range(0, self.best(size)[1] // self.side * cells, cells)
        ]

    def places(self, size: tuple[int, int], tile: int, inside: Int[Tensor, "m 2"]) -> Int[Tensor, "m 2"]:
        """The cells of the plane that places in the area of a tile, counted from 0, come to stand in."""
        rows, columns = self._window(size)
        tall, wide = divmod(tile, self.best(size)[1] // self.side)
        corner = [max(0, tall * self.cells - rows.start), max(0, wide * self.cells - columns.start)]
        kept = rows.stop - rows.start, columns.stop - columns.start
        return _scaled(inside + torch.tensor(corner, device=inside.device), kept, self.detail(size))

    def _window(self, size: tuple[int, int]) -> tuple[slice, slice]:
        """The rows and columns of the canvas's patches that are picture; the rounding is that of the checkpoints' own code."""
        canvas = self.best(size)
        rows, columns = canvas[0] // self.side * self.cells, canvas[1] // self.side * self.cells
        if size[1] / size[0] > columns / rows:
            margin = (rows - int(round(size[0] * (columns / size[1]), 7))) // 2
            return slice(margin, rows - margin), slice(0, columns)
        margin = (columns - int(round(size[1] * (rows / size[0]), 7))) // 2
        return slice(0, rows), slice(margin, columns - margin)

    def _scaled(self, rows: int, columns: int) -> tuple[int, int]:
        ratio = math.sqrt(rows * columns / (self.most * self.cells**2)) if self.most else 1.0
        # a little more than the most is let through
        return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)


@dataclass(frozen=True, slots=True)
class AnyRes:
    """`Views` of pictures on a canvas, and of clips frame by frame, `lift` being what is made of features before planes are.

    `shrunk` is how many rows and columns `shrink` leaves of a frame. Where it makes them of squares of `square` x `square` patches each, a
    shortened transformer merges these; where it does otherwise (1), merging comes in its place, and so it does where a plane is scaled.
    """

    canvas: Canvas
    frames: Prepare
    width: int
    lift: Callable[[Float[Tensor, "v n d"]], Float[Tensor, "v n e"]]
    shrink: Shrink
    shrunk: int
    square: int = 1

    def count(self, size: tuple[int, int], frames: int) -> int:
        """See `mmsdk.vision.tiled.Views`."""
        rows, columns = self.canvas.detail(size)
        return frames * self.shrunk**2 if frames else self.canvas.cells**2 + rows * columns

    def cut(self, item: Media) -> Float[Tensor, "v 3 y x"]:
        """See `mmsdk.vision.tiled.Views`."""
        return self.frames(item.frames) if isinstance(item, Video) else self.canvas.cut(item.pixels)

    def tokens(self, item: Media, viewed: Viewed) -> VisualTokens:
        """See `mmsdk.vision.tiled.Views`."""
        seen = (self.lift(viewed.features), viewed.saliency[..., None], viewed.keys)
        if isinstance(item, Video):
            features, saliency, keys = (self._clip(x) for x in seen)
            grid = (len(item.frames), self.shrunk, self.shrunk)
            positions = cells_of(grid, features.device)
        else:
            features, saliency, keys = (torch.cat([x[0], self.canvas.plane(x[1:], item.size)]) for x in seen)
            detail, cells = self.canvas.detail(item.size), self.canvas.cells
            plane = cells_of((1, *detail), features.device) + torch.tensor([1, 0, 0], device=features.device)
            grid, positions = self.grid(item.size), torch.cat([cells_of((1, cells, cells), features.device), plane])
        times = item.times if isinstance(item, Video) else torch.zeros(2)
        weight = torch.ones(len(features), device=features.device)
        return VisualTokens(features, positions, weight, grid, times.to(features.device), saliency[:, 0], keys)

    def areas(self, size: tuple[int, int], frames: int) -> list[Area]:
        """See `mmsdk.vision.tiled.Views`."""
        cells = self.canvas.cells
        side = self.shrunk * self.square if self.square > 1 else cells
        return [Area(0, side, 0, side, self.square)] * frames or [Area(0, cells, 0, cells), *self.canvas.areas(size)]

    def merged(self, item: Media, views: Sequence[Merged]) -> Shortened:
        """See `mmsdk.vision.tiled.Views`."""
        areas = self.areas(item.size, len(views) if isinstance(item, Video) else 0)
        grid = (len(views), self.shrunk, self.shrunk) if isinstance(item, Video) else self.grid(item.size)
        lifted = [self._lifted(view, area.side**2) for view, area in zip(views, areas, strict=True)]
        places = [self._places(item, number, area, view.places) for number, (view, area) in enumerate(zip(views, areas, strict=True))]
        device = places[0].device
        squares = [self._places(item, number, area, cells_of((1, *area.grid), device)[:, 1:]) for number, area in enumerate(areas)]
        return together(lifted, places, squares, grid, item.times if isinstance(item, Video) else torch.zeros(2))

    def _lifted(self, view: Merged, each: int) -> Merged:
        return replace(view, features=self.lift(view.features.unflatten(1, (each, -1))).mean(dim=1))

    def _places(self, item: Media, number: int, area: Area, inside: Int[Tensor, "m 2"]) -> Int[Tensor, "m 3"]:
        """Where places in a view stand on the grid of its input."""
        if isinstance(item, Video):
            return F.pad(_scaled(inside, area.grid, (self.shrunk, self.shrunk)), (1, 0), value=number)
        return F.pad(self.canvas.places(item.size, number - 1, inside) if number else inside, (1, 0), value=min(number, 1))

    def grid(self, size: tuple[int, int]) -> tuple[int, int, int]:
        """The grid of a picture of (height, width) pixels: as large as the overview and the plane need it."""
        rows, columns = self.canvas.detail(size)
        return 2, max(rows, self.canvas.cells), max(columns, self.canvas.cells)

    def _clip(self, x: Float[Tensor, "f n d"]) -> Float[Tensor, "m d"]:
        cells = self.canvas.cells
        return self.shrink(x.transpose(1, 2).unflatten(2, (cells, cells))).flatten(2).transpose(1, 2).flatten(0, 1)


def pooled(stride: int) -> Shrink:
    """Means of `stride` x `stride` patches; what is left over at the edges is not looked at."""

    def shrink(planes: Float[Tensor, "f d g g"]) -> Float[Tensor, "f d y x"]:
        return F.avg_pool2d(planes, stride)

    return shrink


def halved(planes: Float[Tensor, "f d g g"]) -> Float[Tensor, "f d y x"]:
    """Half as many rows and columns, rounded up, by bilinear interpolation."""
    side = (planes.shape[-1] + 1) // 2
    return F.interpolate(planes, (side, side), mode="bilinear")


def _within(kept: slice, start: int, cells: int) -> tuple[int, int]:
    """From and to where a tile that begins at `start` is within what is kept, counted from its own first patch."""
    first, last = max(kept.start - start, 0), min(kept.stop - start, cells)
    return (first, last) if first < last else (0, 0)


def _scaled(places: Int[Tensor, "m 2"], size: tuple[int, int], to: tuple[int, int]) -> Int[Tensor, "m 2"]:
    """The middles of cells of a grid of `size` on one of another size."""
    sizes, wanted = (torch.tensor(one, device=places.device) for one in (size, to))
    return (2 * places + 1) * wanted // (2 * sizes)
