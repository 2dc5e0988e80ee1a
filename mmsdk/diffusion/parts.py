"""What diffusion transformers for video have in common: latents as patches and back, and the time as waves."""

import math
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.diffusion.attention.types import Grid
from mmsdk.errors import InputError

__all__ = ["Order", "Patch", "Perceptron", "cut", "gelu", "grid_of", "joined", "waves"]

Patch = tuple[int, int, int]
Order = Literal["channels_first", "channels_last"]


class Perceptron(nn.Module):
    """Two layers."""

    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.one = nn.Linear(inner, width)
        self.two = nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "*b i"], activation: Callable[[Tensor], Tensor] = F.silu) -> Float[Tensor, "*b o"]:
        """With this between them."""
        out: Tensor = self.two(activation(self.one(x)))
        return out


def grid_of(latents: Float[Tensor, "b c f h w"], patch: Patch) -> Grid:
    """The tokens that latents are cut into. Raises InputError where their sides are no multiples of a patch."""
    sides = latents.shape[2:]
    if any(side % size for side, size in zip(sides, patch, strict=True)):
        raise InputError(f"they are {tuple(latents.shape)}; the model takes sides that are multiples of {patch}", item="latents")
    return Grid(*(side // size for side, size in zip(sides, patch, strict=True)))


def cut(latents: Float[Tensor, "b c f h w"], grid: Grid, patch: Patch, channels: int) -> Float[Tensor, "b n d"]:
    """Patches in the order of the grid, the channels of each first. Raises InputError where there are not so many channels."""
    if latents.shape[1] != channels:
        raise InputError(f"they are {tuple(latents.shape)}; the model takes {channels} channels", item="latents")
    t, h, w = patch
    parts = latents.unflatten(4, (grid.width, w)).unflatten(3, (grid.height, h)).unflatten(2, (grid.frames, t))
    patches: Tensor = parts.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)
    return patches


def joined(x: Float[Tensor, "b n d"], grid: Grid, patch: Patch, order: Order) -> Float[Tensor, "b e f h w"]:
    """Latents of patches; `order` says where the channels of a patch stand."""
    t, h, w = patch
    x = x.unflatten(1, (grid.frames, grid.height, grid.width))
    first = order == "channels_first"
    x = x.unflatten(-1, (-1, t, h, w)) if first else x.unflatten(-1, (t, h, w, -1)).movedim(-1, 4)
    return x.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3)


def waves(time: Float[Tensor, "*b"], width: int) -> Float[Tensor, "*b d"]:
    """Cosines, then sines, of the time at frequencies from 1 down to 1 / 10000."""
    rates = torch.exp(-math.log(10000) * torch.arange(width // 2, dtype=torch.float32, device=time.device) / (width // 2))
    angles = time[..., None].float() * rates
    return torch.cat((angles.cos(), angles.sin()), -1)


def gelu(x: Tensor) -> Tensor:
    """By the hyperbolic tangent, as these models were trained."""
    return F.gelu(x, approximate="tanh")
