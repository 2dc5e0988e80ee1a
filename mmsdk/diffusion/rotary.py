"""Rotary positions in three dimensions: where a token of a latent video stands in time, height and width turns its queries and keys.

`ByAxis` gives each axis its own channels of a head, as Wan does; `Fractional` takes places as fractions of a reference clip and spreads its
frequencies over all heads, as LTX does. Channels are turned in neighbouring pairs (RoFormer, arXiv 2104.09864).
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.diffusion.attention.types import Grid

__all__ = ["ByAxis", "Fractional", "Rotary", "Rotation", "turned"]

Rotation = tuple[Float[Tensor, "n #h half"], Float[Tensor, "n #h half"]]


@runtime_checkable
class Rotary(Protocol):
    """Cosines and sines of every token of a grid, for `heads` heads of `head_dim` channels; `first` is the frame that it begins with."""

    def __call__(self, grid: Grid, heads: int, head_dim: int, device: torch.device, first: int = 0) -> Rotation: ...


@dataclass(frozen=True, slots=True)
class ByAxis:
    """A third of a head's pairs for height, a third for width, the rest for time; places are counted, without a limit."""

    theta: float = 10000.0

    def __call__(self, grid: Grid, heads: int, head_dim: int, device: torch.device, first: int = 0) -> Rotation:
        """See `Rotary`; the same for all heads. Angles are taken in float64 on the processor, since few devices have it."""
        side = 2 * (head_dim // 6)
        sizes, widths = (grid.frames, grid.height, grid.width), (head_dim - 2 * side, side, side)
        starts = (first, 0, 0)
        parts = []
        for axis, (size, width, start) in enumerate(zip(sizes, widths, starts, strict=True)):
            rates = self.theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
            angles = torch.arange(start, start + size, dtype=torch.float64)[:, None] * rates
            shape = [1, 1, 1, angles.shape[1]]
            shape[axis] = size
            parts.append(angles.view(shape).expand(*sizes, -1))
        angles = torch.cat(parts, -1).reshape(grid.video, 1, -1)
        return angles.cos().float().to(device), angles.sin().float().to(device)


@dataclass(frozen=True, slots=True)
class Fractional:
    """Places times `scale` (seconds a latent frame, pixels a latent row and column) over `base`, a clip of reference, between 0 and 1."""

    scale: tuple[float, float, float] = (8 / 25, 32.0, 32.0)
    base: tuple[float, float, float] = (20.0, 2048.0, 2048.0)
    theta: float = 10000.0

    def __call__(self, grid: Grid, heads: int, head_dim: int, device: torch.device, first: int = 0) -> Rotation:
        """See `Rotary`; heads differ. Frequencies vary before axes do; pairs that are left over stand first and are not turned."""
        width = heads * head_dim
        axes = [torch.arange(size, dtype=torch.float32) for size in (grid.frames, grid.height, grid.width)]
        axes[0] = axes[0] + first
        places = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).view(-1, 3)
        places = places * torch.tensor(self.scale) / torch.tensor(self.base)
        rates = self.theta ** torch.linspace(0, 1, width // 6) * (math.pi / 2)
        angles = (rates[:, None] * (2 * places - 1)[:, None]).flatten(1)
        still = torch.zeros(len(angles), width // 2 - angles.shape[1])
        angles = torch.cat((still, angles), 1).view(-1, heads, head_dim // 2)
        return angles.cos().to(device), angles.sin().to(device)


def turned(x: Float[Tensor, "b n h d"], rotation: Rotation) -> Float[Tensor, "b n h d"]:
    """Neighbouring channels as the two sides of a pair, turned by the token's angle; computed in float32."""
    cosine, sine = rotation
    one, other = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((one * cosine - other * sine, one * sine + other * cosine), -1).flatten(-2).to(x.dtype)
