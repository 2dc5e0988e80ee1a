"""Uniform: a regular lattice over time, rows and columns. The second floor of every table, and hard to beat at high budgets.

The budget is spread evenly over the frames, a frame's share over rows and columns in the proportions of its grid; every token sits
in the middle of its part. Tokens that no longer fill their grid (an earlier method ran) are spaced evenly in reading order.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.plan import check, keep
from mmsdk.tokencomp.types import Compressed
from mmsdk.vision.types import VisualTokens

__all__ = ["Uniform"]


@dataclass(frozen=True, slots=True)
class Uniform:
    """Keeps `budget` tokens on a lattice; no knobs."""

    def __call__(
        self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget], query: Float[Tensor, "q d"] | None = None
    ) -> list[Compressed]:
        check(tokens, budgets)
        return [_thin(item, budget.count) for item, budget in zip(tokens, budgets, strict=True)]


def _thin(item: VisualTokens, count: int) -> Compressed:
    started = time.perf_counter()
    frames, rows, columns = item.grid
    full = len(item) == frames * rows * columns
    index = _lattice(item.grid, count) if full else _spaced(len(item), count)
    return keep(item, index.to(item.features.device), method="uniform", seconds=time.perf_counter() - started)


def _spaced(n: int, count: int) -> Int[Tensor, " k"]:
    """The middles of `count` equal parts of range(n)."""
    return (torch.arange(count) * 2 + 1) * n // (2 * count)


def _lattice(grid: tuple[int, int, int], count: int) -> Int[Tensor, " k"]:
    frames, rows, columns = grid
    # a frame's share is the number of evenly spaced tokens that fall into it; shares differ by one at most
    shares = torch.bincount(_spaced(frames, count) if count <= frames else torch.arange(count) * frames // count, minlength=frames)
    starts = torch.arange(frames) * rows * columns
    parts = [start + _frame(rows, columns, share) for start, share in zip(starts.tolist(), shares.tolist(), strict=True) if share]
    return torch.cat(parts)


def _frame(rows: int, columns: int, count: int) -> Int[Tensor, " k"]:
    """`count` cells of a rows x columns grid: as many lines as the shape of the grid suggests, evenly filled."""
    wanted = round(math.sqrt(count * rows / columns))
    # no line can hold more than `columns` tokens, and an empty line would be a wasted one
    lines = min(max(wanted, -(-count // columns), 1), rows, count)
    token = torch.arange(count)
    line = token * lines // count
    first = -(-line * count // lines)
    size = -(-(line + 1) * count // lines) - first
    y = _spaced(rows, lines)[line]
    x = ((token - first) * 2 + 1) * columns // (2 * size)
    return y * columns + x
