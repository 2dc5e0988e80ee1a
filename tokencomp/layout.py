"""How braco lays out a grid of tokens: the coefficients that stay, Q_0, where tokens sit and what part of the grid each pools.

All of it hangs on shapes and counts, so it is made once and kept. Letters: n cells, p basis tokens, r residual tokens.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from mmsdk.tokencomp.coder import read_coder
from mmsdk.tokencomp.transform import Basis, Grid, band, box, inside, low, orthonormal, separable, sides

__all__ = ["BasisName", "Layout", "flat", "layout"]

BasisName = Literal["dct", "haar", "pca"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The `box` of the coefficients at `index`, () where they fill none, `start` = Q_0, the `cells` that the basis tokens sit in, the one
    of them that tells of each cell (`owner`), and the cells that each residual token pools."""

    box: tuple[int, ...]
    basis: Basis
    start: Float[Tensor, "p p"]
    index: Int[Tensor, "p 3"]
    cells: Int[Tensor, " p"]
    owner: Int[Tensor, " n"]
    pools: Bool[Tensor, "r n"]


@lru_cache(maxsize=16)
def layout(
    name: BasisName, calibration: str, grid: Grid, count: int, residual: int, device: torch.device, *, local: bool, boxed: bool
) -> Layout:
    """`count` tokens of a grid, of them at least `residual` that pool what the basis misses, where the coefficients are `boxed`.

    Otherwise, and where all n are to stay, the lowest frequencies take all tokens. Q_0 is the identity where it is not to be `local`, and
    where the coefficients fill no box.
    """
    n = math.prod(grid)
    index, shape = _box(grid, count - residual) if boxed and count < n else _lowest(grid if name == "pca" else sides(name, grid), count)
    basis = _basis(name, calibration, grid, index)
    if shape:
        places = inside(grid)
        owner = flat(torch.stack([band(places[:, i], grid[i], shape[i]) for i in range(3)], dim=1), shape)
        cells = flat((2 * inside(shape) + 1) * torch.tensor(grid) // (2 * torch.tensor(shape)), grid)
    else:
        owner, cells = band(torch.arange(n), n, count), (2 * torch.arange(count) + 1) * n // (2 * count)
    start = _start(name, basis, shape, owner) if shape and local else torch.eye(len(index))
    pools = torch.arange(count - len(index))[:, None] == _pools(grid, count - len(index))
    analysis, synthesis, start = (matrix.float().to(device) for matrix in (basis.analysis, basis.synthesis, start))
    placed = (index.to(device), cells.to(device), owner.to(device), pools.to(device))
    return Layout(shape or (), Basis(analysis, synthesis, basis.size), start, *placed)


def flat(places: Int[Tensor, "*b 3"], shape: tuple[int, ...]) -> Int[Tensor, "*b"]:
    """The numbers in raster order of places (t, y, x) in a shape."""
    t, y, x = places.unbind(dim=-1)
    return (t * shape[1] + y) * shape[2] + x


def _box(grid: Grid, most: int) -> tuple[Int[Tensor, "p 3"], Grid | None]:
    shape = box(grid, most)
    return inside(shape), shape


def _lowest(shape: Grid, count: int) -> tuple[Int[Tensor, "p 3"], Grid | None]:
    """The lowest frequencies and the box that they fill, None where they fill none."""
    index = low(shape, count)
    t, u, v = (index.amax(dim=0) + 1).tolist()
    return (inside((t, u, v)), (t, u, v)) if t * u * v == count else (index, None)


def _basis(name: BasisName, calibration: str, grid: Grid, index: Int[Tensor, "p 3"]) -> Basis:
    if name != "pca":
        return separable(name, grid, index)
    # directions have no frequency: the first ones take the place of the lowest
    rows = read_coder(calibration, torch.device("cpu")).calibration[grid][: len(index)]
    return Basis(rows, rows.T, math.prod(grid))


def _start(name: BasisName, basis: Basis, shape: tuple[int, ...], owner: Int[Tensor, " n"]) -> Float[Tensor, "p p"]:
    """Q_0: the inverse DCT of the box, for another basis the means of the parts by coefficient, made orthonormal from the coarsest on."""
    t, u, v = shape
    if name == "dct":
        return separable("dct", (t, u, v), inside((t, u, v))).synthesis
    member = F.one_hot(owner, t * u * v).to(basis.synthesis.dtype)
    return orthonormal(member.T / member.sum(dim=0).clamp_min(1)[:, None] @ basis.synthesis)


def _pools(grid: Grid, count: int) -> Int[Tensor, " n"]:
    """The part of each cell, of `count` parts: of time first, then rows of parts whose numbers differ by one at most."""
    (frames, rows, columns), (t, y, x) = grid, inside(grid).unbind(dim=1)
    times = min(frames, max(1, count))
    here = band(t, frames, times)
    first, some = here * count // times, (here + 1) * count // times - here * count // times
    bands = (some * rows / columns).sqrt().round().long().clamp_min(1).maximum(-(-some // columns)).minimum(some.clamp(1, rows))
    row = band(y, rows, bands)
    before, across = row * some // bands, (row + 1) * some // bands - row * some // bands
    return first + before + band(x, columns, across)
