"""What is learned for each budget, and the file that it is shipped in."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mmsdk.apps.kept import write
from mmsdk.errors import InputError
from mmsdk.tokencomp.coder import Trained
from mmsdk.tokencomp.transform import Grid, box

__all__ = ["Media", "Set", "Target", "export"]

Media = Literal["image", "clip"]


@dataclass(frozen=True, slots=True)
class Target:
    """A budget to train for: `count` tokens, of which `residual` at least pool what the basis misses, each in `pools` ways."""

    media: Media
    count: int
    residual: int
    pools: int = 1

    def __str__(self) -> str:
        return f"{self.media}.{self.count}"


class Set(nn.Module):
    """The parameters of one budget: E by coefficient, A by box, and the residual map, all at the untrained start, the first s at `score`.

    Of the map's two factors the first is random and the second zero, so that it adds nothing but can learn.
    """

    def __init__(self, target: Target, grids: Sequence[Grid], score: Float[Tensor, " d"], rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.target, width = target, len(score)
        boxes = sorted({box(grid, target.count - target.residual) for grid in grids})
        self.embedding = nn.Parameter(torch.zeros(*(max(shape[i] for shape in boxes) for i in range(3)), width))
        self.skew = nn.ParameterDict({_name(shape): nn.Parameter(torch.zeros(math.prod(shape), math.prod(shape))) for shape in boxes})
        self.score = nn.Parameter(torch.cat([score[None], torch.zeros(target.pools - 1, width)]))
        self.down = nn.Parameter(torch.randn(target.pools, width, rank, generator=generator) / math.sqrt(width))
        self.up = nn.Parameter(torch.zeros(target.pools, rank, width))
        self.bias = nn.Parameter(torch.zeros(width))

    @torch.no_grad()
    def go_on(self, trained: Trained) -> None:
        """Begin where another training of this budget ended. Raises InputError where that is of another shape."""
        pools = len(trained.score)
        pairs = [(self.embedding, trained.embedding), (self.score[:pools], trained.score), (self.bias, trained.bias)]
        if trained.up.any():
            pairs += [(self.down[:pools], trained.down), (self.up[:pools], trained.up)]
        pairs += [(matrix, trained.skew[_shape(name)]) for name, matrix in self.skew.items() if _shape(name) in trained.skew]
        if any(mine.shape != theirs.shape for mine, theirs in pairs):
            raise InputError(f"its set {self.target} does not fit: {[tuple(theirs.shape) for _, theirs in pairs]}", item="start")
        for mine, theirs in pairs:
            mine.copy_(theirs)

    def trained(self) -> Trained:
        """As the coder takes it, differentiable."""
        skew = {_shape(name): matrix for name, matrix in self.skew.items()}
        return Trained(self.target.residual, self.embedding, skew, self.score, self.down, self.up, self.bias)


def export(path: Path, basis: str, sets: Sequence[Set], calibration: Mapping[Grid, Float[Tensor, "k n"]], made: str) -> None:
    """Write the file that ships, 16-bit, whole or not at all, without maps that learned nothing; see `mmsdk.tokencomp.coder`.

    `made` says what it was trained on.
    """
    tensors = {f"{one.target}.{name}": tensor for one in sets for name, tensor in _learned(one).items()}
    tensors |= {f"calibration.{_name(grid)}": rows for grid, rows in calibration.items()}
    residual = json.dumps({str(one.target): one.target.residual for one in sets})
    write(path, {name: tensor.detach().half() for name, tensor in tensors.items()}, {"basis": basis, "residual": residual, "made": made})


def _learned(one: Set) -> dict[str, Tensor]:
    """The parameters of a set; of a map that adds nothing no more than its place."""
    tensors = dict(one.state_dict())
    if not tensors["up"].any():
        width = one.score.shape[1]
        tensors |= {"score": one.score[:1], "down": torch.zeros(1, width, 1), "up": torch.zeros(1, 1, width)}
    return tensors


def _name(shape: Grid) -> str:
    return "x".join(map(str, shape))


def _shape(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split("x")))
