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
from mmsdk.tokencomp.coder import Trained
from mmsdk.tokencomp.transform import Grid, box

__all__ = ["Media", "Set", "Target", "export"]

Media = Literal["image", "clip"]


@dataclass(frozen=True, slots=True)
class Target:
    """A budget to train for: `count` tokens, of which `residual` at least pool what the basis misses."""

    media: Media
    count: int
    residual: int

    def __str__(self) -> str:
        return f"{self.media}.{self.count}"


class Set(nn.Module):
    """The parameters of one budget: E by coefficient, A by box, and the residual map, all at the untrained start, and s at `score`.

    Of the map's two factors the first is random and the second zero, so that it adds nothing but can learn.
    """

    def __init__(self, target: Target, grids: Sequence[Grid], score: Float[Tensor, " d"], rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.target, width = target, len(score)
        boxes = sorted({box(grid, target.count - target.residual) for grid in grids})
        self.embedding = nn.Parameter(torch.zeros(*(max(shape[i] for shape in boxes) for i in range(3)), width))
        self.skew = nn.ParameterDict({_name(shape): nn.Parameter(torch.zeros(math.prod(shape), math.prod(shape))) for shape in boxes})
        self.score = nn.Parameter(score.clone())
        self.down = nn.Parameter(torch.randn(width, rank, generator=generator) / math.sqrt(width))
        self.up = nn.Parameter(torch.zeros(rank, width))
        self.bias = nn.Parameter(torch.zeros(width))

    def trained(self) -> Trained:
        """As the coder takes it, differentiable."""
        skew = {tuple(map(int, name.split("x"))): matrix for name, matrix in self.skew.items()}
        return Trained(self.target.residual, self.embedding, skew, self.score, self.down, self.up, self.bias)


def export(path: Path, basis: str, sets: Sequence[Set], calibration: Mapping[Grid, Float[Tensor, "k n"]]) -> None:
    """Write the file that ships, 16-bit, whole or not at all; see `mmsdk.tokencomp.coder`."""
    tensors = {f"{one.target}.{name}": tensor for one in sets for name, tensor in one.state_dict().items()}
    tensors |= {f"calibration.{_name(grid)}": rows for grid, rows in calibration.items()}
    residual = json.dumps({str(one.target): one.target.residual for one in sets})
    write(path, {name: tensor.detach().half() for name, tensor in tensors.items()}, {"basis": basis, "residual": residual})


def _name(shape: Grid) -> str:
    return "x".join(map(str, shape))
