"""Along which axes a prompt stands: one, where every token is the next, or time, row and column (M-RoPE, Qwen2-VL, arXiv 2409.12191).

On three axes a word has the same place on each. The tokens of a visual input stand on its grid, which begins behind the words before it;
the next word stands behind the last row or column, whichever is further, so that a picture is as long as its longer side. Time alone makes
nothing longer. What a compressor leaves keeps its cell of the grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.vision.types import VisualTokens

__all__ = ["LINE", "Axes", "Grid", "Line", "Standing", "Turns", "turned"]

# Seconds are read with this tolerance, in places of the time axis: a step that falls on a whole place must not fall short of it.
_NEAR = 1e-3


@dataclass(frozen=True, slots=True)
class Line:
    """One axis."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Three axes. A second of a clip takes `per_second` places of the time axis, and each step at least one; with 0 each step takes one."""

    per_second: float = 0.0

    def cells(self, cells: Int[Tensor, " n"], tokens: VisualTokens) -> Int[Tensor, "n 3"]:
        """Where these cells of an input's grid, counted in reading order, stand from its start: their step, row and column."""
        _, rows, columns = tokens.grid
        step, place = cells // (rows * columns), torch.stack((cells // columns % rows, cells % columns), dim=1)
        return torch.cat((self._passed(tokens.times.to(cells.device))[step][:, None], place), dim=1)

    def _passed(self, times: Float[Tensor, " t"]) -> Int[Tensor, " t"]:
        """The places of the time axis from the first step to each, strictly rising."""
        steps = torch.arange(len(times), device=times.device)
        if not self.per_second:
            return steps
        passed = ((times - times[0]) * self.per_second + _NEAR).floor().long()
        return (passed - steps).cummax(0).values + steps


Axes = Line | Grid
LINE = Line()


@dataclass(frozen=True, slots=True)
class Standing:
    """A run of a prompt: words, which have no `cells`, or tokens of a visual input, of which those at `places`, ascending, are there."""

    length: int
    cells: tuple[Int[Tensor, "n 3"], ...] = ()
    places: tuple[Int[Tensor, " m"], ...] = ()


@dataclass(frozen=True, slots=True)
class Turns:
    """The places of a prompt's tokens on each axis, and where the first word behind it stands."""

    axes: Int[Tensor, "3 s"]
    following: Int[Tensor, ""]


def turned(runs: Sequence[Standing], device: torch.device) -> Turns:
    """Where runs stand, one after another; a clip's time may reach further than the words behind it, as transformers 5 has it."""
    start = torch.zeros((), dtype=torch.int64, device=device)
    found = []
    for run in runs:
        for cells, places in zip(run.cells, run.places, strict=True):
            found.append((cells[places] + start).T)
            if len(cells):
                start = start + cells[:, 1:].amax() + 1
        if not run.cells:
            found.append((torch.arange(run.length, device=device) + start).expand(3, -1))
            start = start + run.length
    return Turns(torch.cat(found, dim=1), start)
