"""Pooling of a clip's tokens over time and space, a few frames at a time.

Cells at a ragged edge, and the last step, hold fewer patches; nothing is made up to fill them.

Letters: f frames, n patches of a frame, c cells of it, m tokens of an input after pooling, d width.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

__all__ = ["Pool", "patches", "pooled_grid"]


class Pool:
    """Pools the frames of one input as they are seen: of a long clip no more is held than pooling leaves, and the step under way."""

    def __init__(self, grid: tuple[int, int], pool: tuple[int, int, int]) -> None:
        self._grid, self._time, self._space = grid, pool[0], pool[1:]
        self._steps: list[Tensor] = []
        self._rest: list[Tensor] = []

    def take(self, x: Float[Tensor, "f n d"]) -> None:
        """The next frames."""
        if self._time == 1:
            self._steps.append(self._cells(x).to(x.dtype))
            return
        cells = torch.cat([*self._rest, self._cells(x)])
        whole = len(cells) // self._time
        steps, rest = cells.split([whole * self._time, len(cells) % self._time])
        self._steps.append(steps.unflatten(0, (whole, self._time)).mean(dim=1).to(x.dtype))
        self._rest = [rest] if len(rest) else []

    def tokens(self) -> Float[Tensor, "m d"]:
        """All that was seen; the last step may hold fewer frames."""
        last = [rest.mean(dim=0, keepdim=True).to(self._steps[0].dtype) for rest in self._rest]
        return torch.cat([*self._steps, *last]).flatten(0, 1)

    def _cells(self, x: Float[Tensor, "f n d"]) -> Float[Tensor, "f c d"]:
        """Means over space, in float32 where there is anything to be pooled."""
        if (self._time, *self._space) == (1, 1, 1):
            return x
        frames = x.transpose(1, 2).unflatten(2, self._grid).float()
        cells: Tensor = F.avg_pool2d(frames, self._space, ceil_mode=True, count_include_pad=False)
        return cells.flatten(2).transpose(1, 2)


def pooled_grid(grid: tuple[int, int, int], pool: tuple[int, int, int]) -> tuple[int, int, int]:
    """The one place that says how many steps, rows and columns pooling leaves."""
    (t, h, w), (pt, ph, pw) = grid, pool
    return -(-t // pt), -(-h // ph), -(-w // pw)


def patches(grid: tuple[int, int, int], pool: tuple[int, int, int], device: torch.device) -> Float[Tensor, " m"]:
    """How many patches each token stands for."""
    frames = torch.ones(grid[0], device=device).split(pool[0])
    cells = F.avg_pool2d(torch.ones(1, *grid[1:], device=device), pool[1:], ceil_mode=True, divisor_override=1)
    return torch.outer(torch.stack([step.sum() for step in frames]), cells.flatten()).flatten()
