"""Orthonormal bases over a grid of tokens, which of their coefficients stay, and rotations of what stayed.

Everything here hangs on shapes alone, never on a picture: a DCT or Haar basis is a product of one matrix for each axis, so that any
set of coefficients (t, u, v) is one matrix over all cells of the grid. Built in double precision.

Letters: n cells of a grid (t, h, w), k coefficients kept.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Basis", "Grid", "band", "box", "cayley", "dct", "haar", "inside", "low", "orthonormal", "separable", "sides"]

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Basis:
    """Coefficients Y = analysis X of the tokens X, and the tokens synthesis Y that they stand for.

    The transform is over `size` samples: the n cells, or more where the basis pads the grid. Without padding synthesis is analysis^T.
    """

    analysis: Float[Tensor, "k n"]
    synthesis: Float[Tensor, "n k"]
    size: int


def dct(n: int) -> Float[Tensor, "n n"]:
    """The orthonormal DCT-II: row u is c_u cos(pi u (2 j + 1) / 2 n), with c_0 = sqrt(1 / n) and c_u = sqrt(2 / n) behind it."""
    j = torch.arange(n, dtype=torch.float64)
    rows = math.sqrt(2 / n) * torch.cos(math.pi / (2 * n) * j[:, None] * (2 * j + 1))
    rows[0] = math.sqrt(1 / n)
    return rows


def haar(n: int) -> Float[Tensor, "n n"]:
    """The orthonormal Haar wavelets of a power of two, from coarse to fine: the mean, then differences of halves, quarters, ..."""
    rows = torch.ones(1, 1, dtype=torch.float64)
    while len(rows) < n:
        coarse = torch.kron(rows, rows.new_tensor([[1.0, 1.0]]))
        fine = torch.kron(torch.eye(len(rows), dtype=rows.dtype), rows.new_tensor([[1.0, -1.0]]))
        rows = torch.cat([coarse, fine]) / math.sqrt(2)
    return rows


def sides(name: Literal["dct", "haar"], grid: Grid) -> Grid:
    """The sides of what is transformed: the grid, or for Haar the powers of two that it is padded to."""
    t, h, w = (1 << (side - 1).bit_length() if name == "haar" else side for side in grid)
    return t, h, w


def separable(name: Literal["dct", "haar"], grid: Grid, index: Int[Tensor, "k 3"]) -> Basis:
    """The coefficients at `index`, (t, u, v) each, of a DCT or, over the grid padded by reflection, of a Haar transform."""
    axes = [_axis(name, side) for side in grid]
    rows = [analysis[index[:, i]] for i, (analysis, _) in enumerate(axes)]
    columns = [synthesis.T[index[:, i]] for i, (_, synthesis) in enumerate(axes)]
    analysis, synthesis = (torch.einsum("kt,kh,kw->kthw", *parts).flatten(1) for parts in (rows, columns))
    return Basis(analysis, synthesis.T, math.prod(sides(name, grid)))


def low(shape: Grid, count: int) -> Int[Tensor, "k 3"]:
    """The `count` coefficients of lowest frequency (t/T)^2 + (u/H)^2 + (v/W)^2 on a shape (T, H, W), in this order, then by t, u, v."""
    index = inside(shape)
    # in whole numbers, over the common denominator, so that equal frequencies are equal
    scaled = index * torch.tensor([math.prod(shape) // side for side in shape])
    return index[scaled.square().sum(dim=1).argsort(stable=True)[:count]]


def inside(shape: Grid) -> Int[Tensor, "n 3"]:
    """(t, u, v) of everything inside a shape, in raster order."""
    return torch.cartesian_prod(*(torch.arange(side) for side in shape))


def box(grid: Grid, most: int) -> Grid:
    """The box of at most `most` coefficients whose proportions are nearest the grid's; the largest of equals, then the flattest.

    Nearest has the least spread of log(side / side of the grid) over the axes, which for a picture is the distance of log aspects.
    """
    shapes = inside((min(grid[0], most), min(grid[1], most), min(grid[2], most))) + 1
    area = shapes.prod(dim=1)
    shapes, area = shapes[area <= most], area[area <= most]
    # an axis of one cell has no proportion
    ratios = (shapes.double() / torch.tensor(grid)).log()[:, [i for i in range(3) if grid[i] > 1] or [0]]
    spread = ((ratios.amax(dim=1) - ratios.amin(dim=1)) * 1e9).round()
    best = (spread * (int(area.max()) + 1) - area).argmin()
    t, u, v = shapes[best].tolist()
    return t, u, v


def band(place: Int[Tensor, " n"], side: int, parts: int | Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Which of `parts` equal parts of a side the middle of each cell lies in; no part is empty where there are at most `side`."""
    return (2 * place + 1) * parts // (2 * side)


def orthonormal(columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """Columns made orthonormal one after another, the first ones turned least, each on the side that it was on."""
    q, r = torch.linalg.qr(columns)
    turned: Tensor = q * torch.where(r.diagonal() < 0, -1, 1)
    return turned


def cayley(a: Float[Tensor, "k k"]) -> Float[Tensor, "k k"]:
    """(I - A) (I + A)^-1 of the skew A = a - a^T: orthogonal whatever a is, the identity where a is zero or symmetric."""
    skew, one = a - a.T, torch.eye(len(a), dtype=a.dtype, device=a.device)
    # the two factors commute
    rotation: Tensor = torch.linalg.solve(one + skew, one - skew)
    return rotation


def _axis(name: Literal["dct", "haar"], side: int) -> tuple[Float[Tensor, "p n"], Float[Tensor, "n p"]]:
    """Analysis and synthesis of one axis of n cells; the padded cells p - n mirror the last ones, without the very last."""
    if name == "dct":
        rows = dct(side)
        return rows, rows.T
    rows = haar(1 << (side - 1).bit_length())
    place = torch.arange(len(rows))
    mirrored = torch.where(place < side, place, 2 * (side - 1) - place)
    return rows @ F.one_hot(mirrored, side).to(rows.dtype), rows.T[:side]
