"""Orders of a video's tokens in which blocks of them lie side by side: as they stand, in tiles, or by the labels of a clustering.

Tokens of text keep their places before and behind the video, in blocks of their own. What hangs on the grid alone is made once and kept.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from mmsdk.diffusion.attention.types import Blocks, Grid

__all__ = ["Tiling", "clusters", "expanded", "raster", "text_kept", "tiles", "window"]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Blocks that lie within tiles. `tile` is the tile of each block, -1 for text; `shape` counts tiles along frames, height and width.

    `first` blocks are text that comes before the video.
    """

    blocks: Blocks
    tile: Int[Tensor, " blocks"]
    shape: tuple[int, int, int]
    first: int

    @property
    def count(self) -> int:
        """How many tiles the video has."""
        return self.shape[0] * self.shape[1] * self.shape[2]

    def video(self, x: Tensor) -> Tensor:
        """Of one entry a block, [b, h, blocks, ...], those of the video. For blocks that are whole tiles."""
        return x.narrow(2, self.first, self.count)


@lru_cache(maxsize=32)
def tiles(grid: Grid, shape: tuple[int, int, int], size: int, device: torch.device) -> Tiling:
    """Tiles of shape (frames, height, width), those at an edge cut short, each in as many blocks of at most `size` tokens as it takes."""
    sides = (grid.frames, grid.height, grid.width)
    counts = tuple(-(-side // step) for side, step in zip(sides, shape, strict=True))
    at = [torch.arange(side) // step for side, step in zip(sides, shape, strict=True)]
    label = ((at[0][:, None, None] * counts[1] + at[1][:, None]) * counts[2] + at[2]).flatten()
    order = label.argsort(stable=True)
    volume = label.bincount(minlength=counts[0] * counts[1] * counts[2])
    blocks, tile = _cut(volume[None, None], size, int((-(-volume // size)).sum()))
    start, stop = (-(-length // size) for length in (grid.before, grid.after))
    tile = F.pad(tile[0, 0], (start, stop), value=-1)
    starts, order = _framed(blocks, order[None, None], grid, size)
    made = Blocks(size, grid.tokens, starts.to(device), order.to(device))
    return Tiling(made, tile.to(device), (counts[0], counts[1], counts[2]), start)


@lru_cache(maxsize=32)
def raster(grid: Grid, size: int, device: torch.device) -> Tiling:
    """Blocks of `size` tokens of the video as they stand, the last one ragged; each is a tile."""
    count, start, stop = (-(-length // size) for length in (grid.video, grid.before, grid.after))
    tile = F.pad(torch.arange(count), (start, stop), value=-1).to(device)
    if not grid.before and not grid.after:
        return Tiling(Blocks(size, grid.tokens), tile, (1, 1, count), start)
    even = (torch.arange(count + 1) * size).clamp_(max=grid.video)
    starts, _ = _framed(even[None, None], None, grid, size)
    return Tiling(Blocks(size, grid.tokens, starts.to(device)), tile, (1, 1, count), start)


def clusters(labels: Int[Tensor, "b h n"], count: int, grid: Grid, size: int) -> tuple[Blocks, Int[Tensor, "b h blocks"]]:
    """The video's tokens by their label, 0 to count - 1, and the label of each block: -1 for text, `count` for a block without tokens.

    A cluster takes as many blocks of at most `size` tokens as it needs. How many that are hangs on values; there are always count + n //
    size blocks, which is enough, so that nobody waits for the device.
    """
    volume = torch.zeros(*labels.shape[:2], count, dtype=torch.int64, device=labels.device)
    volume.scatter_add_(2, labels, torch.ones_like(labels))
    starts, label = _cut(volume, size, count + grid.video // size)
    starts, order = _framed(starts, labels.argsort(dim=-1, stable=True), grid, size)
    start, stop = (-(-length // size) for length in (grid.before, grid.after))
    return Blocks(size, grid.tokens, starts, order), F.pad(label, (start, stop), value=-1)


def window(shape: tuple[int, int, int], reach: tuple[int, int, int], inside: bool, device: torch.device) -> Bool[Tensor, "n n"]:
    """Which tiles lie in the window of `reach` tiles along each side that stands around each tile, all of them in raster order.

    `inside` moves windows at an edge until they lie inside, so that all hold equally many tiles; else they are cut off there.
    """
    near = torch.ones(1, 1, dtype=torch.bool, device=device)
    for side, wide in zip(shape, reach, strict=True):
        at = torch.arange(side, device=device)
        centre = at.clamp(min=wide // 2).clamp(max=side - 1 - wide // 2) if inside else at
        close = (centre[:, None] - at).abs() <= wide // 2
        near = (near[:, None, :, None] & close[None, :, None, :]).flatten(2).flatten(0, 1)
    return near


def expanded(
    mask: Bool[Tensor, "b h tiles tiles2"], rows: Int[Tensor, " rows"], columns: Int[Tensor, " columns"]
) -> Bool[Tensor, "b h rows columns"]:
    """A mask between tiles as one between blocks, by the tile of each block; text reads all and is read by all."""
    return text_kept(mask.index_select(2, rows.clamp(min=0)).index_select(3, columns.clamp(min=0)), rows, columns)


def text_kept(
    mask: Bool[Tensor, "b h rows columns"], rows: Int[Tensor, "*r rows"], columns: Int[Tensor, "*c columns"]
) -> Bool[Tensor, "b h rows columns"]:
    """The mask with the rows and columns of text, whose tile or label is -1, all read."""
    return mask | (rows < 0)[..., :, None] | (columns < 0)[..., None, :]


def _framed(
    starts: Int[Tensor, "b h blocks1"], order: Int[Tensor, "b h n"] | None, grid: Grid, size: int
) -> tuple[Int[Tensor, "b h all1"], Int[Tensor, "b h tokens"]]:
    """Starts and order of the video's blocks, with those of the text around them. No order is the one in which tokens stand."""
    b, h, device = *starts.shape[:2], starts.device
    first = torch.arange(0, grid.before, size, device=device).expand(b, h, -1)
    behind = grid.before + grid.video
    last = torch.arange(behind + size, grid.tokens + size, size, device=device).clamp_(max=grid.tokens).expand(b, h, -1)
    if order is None:
        order = torch.arange(grid.video, device=device).expand(b, h, -1)
    text = torch.arange(grid.tokens, device=device).expand(b, h, -1)
    whole = torch.cat((text[..., : grid.before], order + grid.before, text[..., behind:]), -1)
    return torch.cat((first, starts + grid.before, last), -1), whole


def _cut(volume: Int[Tensor, "b h count"], size: int, most: int) -> tuple[Int[Tensor, "b h most1"], Int[Tensor, "b h most"]]:
    """Where blocks start when stretches of so many tokens are cut into blocks, and each one's stretch; of `most` the last are empty."""
    needed = -(-volume // size)
    until, stop = needed.cumsum(-1), volume.cumsum(-1)
    number = torch.arange(most, device=volume.device).expand(*volume.shape[:2], most).contiguous()
    stretch = torch.searchsorted(until, number, right=True)
    inside = stretch.clamp(max=volume.shape[2] - 1)
    begin = (stop - volume).gather(2, inside) + (number - (until - needed).gather(2, inside)) * size
    starts = begin.minimum(stop.gather(2, inside))
    return torch.cat((starts, stop[..., -1:]), -1), stretch
