"""Radial attention: the further two frames are apart, the narrower the band between them.

Source: Radial Attention, arXiv 2506.19852. Published: between frames i and j, with g the bit length of |i - j| and p tokens in a frame,
tokens of the frames read each other up to a distance within the frame of 2^bitlength(p) / 2^g * decay_factor, at least 128. Where the first
is less than 128, only pairs of frames whose distance is a multiple of 128 / width are read at all. The first frame is read by all (as for
Wan). A block of 128 by 128 is read when, for a pair of frames that it belongs to, more than 60 % of its columns with any entry have more
than a third of their 128 entries. The first steps and layers are dense; how many is set in the authors' scripts, 12 and 1 for Wan.
Reconstruction: in a ragged last block the entries that there are count, and a block always reads itself, which the rule alone does not give
where frames have fewer than 43 tokens.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.diffusion.attention.layout import expanded, raster
from mmsdk.diffusion.attention.types import Choice, Everything, Grid, Place, Selection

__all__ = ["Radial"]

_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Radial:
    """The factor of the widths, whether the first frame is read by all, and how many steps and layers are dense."""

    decay_factor: float = 1.0
    sink: bool = True
    dense_steps: int = 12
    dense_layers: int = 1

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"], place: Place
    ) -> Choice:
        if place.step < self.dense_steps or place.layer < self.dense_layers:
            return Everything()
        tiling = raster(place.grid, _BLOCK, query.device)
        kept = _kept(place.grid, self.decay_factor, self.sink, query.device).expand(*query.shape[:2], -1, -1)
        return Selection(expanded(kept, tiling.tile, tiling.tile), tiling.blocks, tiling.blocks)


def widths(frame: int, frames: int, decay_factor: float) -> tuple[list[int], list[bool]]:
    """For each distance between frames the width of the band, and whether frames so far apart read each other at all."""
    wide = [2 ** frame.bit_length() / 2 ** distance.bit_length() * decay_factor for distance in range(frames)]
    read = [width >= _BLOCK or distance % int(_BLOCK / width) == 0 for distance, width in enumerate(wide)]
    return [int(max(width, _BLOCK)) for width in wide], read


@lru_cache(maxsize=8)
def _kept(grid: Grid, decay_factor: float, sink: bool, device: torch.device) -> Bool[Tensor, "blocks blocks"]:
    """The blocks that are read, one frame of queries after the other: all of it hangs on the grid alone."""
    count = -(-grid.video // _BLOCK)
    token = torch.arange(grid.video, device=device)
    frame, inner = token // grid.frame, token % grid.frame
    # a stretch is what a block of columns and a frame have in common
    stretch = torch.unique_consecutive(frame * count + token // _BLOCK, return_inverse=True)[1]
    home = torch.zeros(int(stretch[-1]) + 1, dtype=torch.int64, device=device).scatter_(0, stretch, token // _BLOCK)
    wide, read = (torch.tensor(column, device=device) for column in widths(grid.frame, grid.frames, decay_factor))
    kept = torch.eye(count, dtype=torch.bool, device=device)
    for i in range(grid.frames):
        apart = (frame - i).abs()
        width, alive = wide[apart], read[apart]
        if sink:
            width, alive = width.where(frame > 0, grid.frame), alive | (frame == 0)
        rows, density = _densities(grid, i, inner, width, device)
        density = density.where(alive, 0)
        any_entry, dense = (_summed(x, stretch, len(home)) for x in (density > 0, density > 1 / 3))
        hit = dense > 0.6 * any_entry
        kept[rows] |= torch.zeros(len(rows), count, dtype=torch.int64, device=device).index_add_(1, home, hit.long()) > 0
    return kept


def _densities(
    grid: Grid, i: int, inner: Int[Tensor, " n"], width: Int[Tensor, " n"], device: torch.device
) -> tuple[Int[Tensor, " rows"], Float[Tensor, "rows n"]]:
    """The row blocks that frame i has a part in, and the share of their tokens that read each column."""
    first = i * grid.frame
    rows = torch.arange(first // _BLOCK, (first + grid.frame - 1) // _BLOCK + 1, device=device)
    low = (rows * _BLOCK - first).clamp(min=0)[:, None]
    high = ((rows + 1) * _BLOCK - first).clamp(max=grid.frame)[:, None]
    reading = (inner + width + 1).minimum(high) - (inner - width).maximum(low)
    return rows, reading.clamp(min=0) / (grid.video - rows * _BLOCK).clamp(max=_BLOCK)[:, None]


def _summed(x: Bool[Tensor, "rows n"], stretch: Int[Tensor, " n"], count: int) -> Int[Tensor, "rows stretches"]:
    return torch.zeros(x.shape[0], count, dtype=torch.int64, device=x.device).index_add_(1, stretch, x.long())
