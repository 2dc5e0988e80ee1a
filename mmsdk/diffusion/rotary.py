"""Rotary positions in three dimensions: where a token of a latent video stands in time, height and width turns its queries and keys.

`ByAxis` gives each axis its own channels of a head, as Wan does; `Spread` does so with rows and columns spread over a side of its own;
`Fractional` takes places as fractions of a reference clip and spreads its frequencies over all heads, as LTX does. Channels are turned in
neighbouring pairs (RoFormer, arXiv 2104.09864). Turning tells how far tokens are from one another, and of pure noise nothing more: `Waves`
are added to tokens, and say where each stands.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mmsdk.diffusion.attention.types import Grid

__all__ = [
    "Anywhere",
    "ByAxis",
    "Fractional",
    "Roaming",
    "Rotary",
    "Rotation",
    "Sines",
    "Spread",
    "Standing",
    "Unturned",
    "Waves",
    "turned",
]

Rotation = tuple[Float[Tensor, "*r n #h half"], Float[Tensor, "*r n #h half"]]


@runtime_checkable
class Rotary(Protocol):
    """Cosines and sines of every token of a grid, for `heads` heads of `head_dim` channels; `first` is the frame that it begins with."""

    def __call__(self, grid: Grid, heads: int, head_dim: int, device: torch.device, first: int = 0) -> Rotation: ...


@dataclass(frozen=True, slots=True)
class ByAxis:
    """Channels of a head for time, height and width by `axes`, else a third for each and what is left over for time; places are counted,
    without a limit.
    """

    theta: float = 10000.0
    axes: tuple[int, ...] = ()

    def __call__(self, grid: Grid, heads: int, head_dim: int, device: torch.device, first: int = 0) -> Rotation:
        """See `Rotary`; the same for all heads. Angles are taken in float64 on the processor, since few devices have it."""
        places = (_counted(grid.frames, first), _counted(grid.height), _counted(grid.width))
        return _by_axis(places, self.axes or _thirds(head_dim), self.theta, device)


@dataclass(frozen=True, slots=True)
class Spread:
    """As `ByAxis`, but rows and columns, however many, are spread over `side` of them: a coarser clip stands at the same places."""

    side: int
    theta: float = 100.0

    def __call__(self, grid: Grid, heads: int, head_dim: int, device: torch.device, first: int = 0) -> Rotation:
        """See `Rotary`; the same for all heads."""
        return _by_axis(self.places(grid, first), _thirds(head_dim), self.theta, device)

    def places(self, grid: Grid, first: int = 0) -> tuple[Float[Tensor, " t"], Float[Tensor, " h"], Float[Tensor, " w"]]:
        """Where frames, rows and columns stand: frames are counted, a row is where its middle is."""
        rows, columns = ((_counted(size) + 0.5) * self.side / size - 0.5 for size in (grid.height, grid.width))
        return _counted(grid.frames, first), rows, columns


@dataclass(frozen=True, slots=True)
class Roaming:
    """Rows and columns of a larger world, half of a head's channels for each, and none for time: what stood somewhere stands there still.

    A frame is a window whose first token is at a place of its own; without places, all are at the origin.
    """

    theta: float = 100.0

    def __call__(self, grid: Grid, heads: int, head_dim: int, device: torch.device, first: int = 0) -> Rotation:
        """See `Rotary`; the same for all heads."""
        return tuple(part[0] for part in self.placed(grid, torch.zeros(1, grid.frames, 2, device=device), head_dim))  # type: ignore[return-value]

    def placed(
        self, grid: Grid, places: Float[Tensor, "b f 2"], head_dim: int
    ) -> tuple[Float[Tensor, "b n 1 e"], Float[Tensor, "b n 1 e"]]:
        """Of windows at places, rows first, in tokens; angles are taken in float64 on the processor."""
        wide = places.double().cpu()
        rows, columns = (wide[..., axis, None] + _counted(size) for axis, size in enumerate((grid.height, grid.width)))
        pairs = head_dim // 4
        parts = [place[..., None] * _rates(count, self.theta) for place, count in ((rows, head_dim // 2 - pairs), (columns, pairs))]
        spans = (*wide.shape[:2], grid.height, grid.width, -1)
        angles = torch.cat((parts[0][:, :, :, None].expand(spans), parts[1][:, :, None].expand(spans)), -1).flatten(1, 3)[:, :, None]
        return angles.cos().float().to(places.device), angles.sin().float().to(places.device)


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


@dataclass(frozen=True, slots=True)
class Unturned:
    """Not at all: what is added to the tokens tells where they stand."""

    def __call__(self, grid: Grid, heads: int, head_dim: int, device: torch.device, first: int = 0) -> Rotation:
        """See `Rotary`."""
        angles = torch.zeros(grid.video, 1, head_dim // 2, device=device)
        return angles.cos(), angles.sin()


def turned(x: Float[Tensor, "b n h d"], rotation: Rotation) -> Float[Tensor, "b n h d"]:
    """Neighbouring channels as the two sides of a pair, turned by the token's angle; computed in float32."""
    cosine, sine = rotation
    one, other = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((one * cosine - other * sine, one * sine + other * cosine), -1).flatten(-2).to(x.dtype)


@runtime_checkable
class Standing(Protocol):
    """What is added to tokens of `width` channels for where in the clip they stand; `first` is the frame that the grid begins with."""

    def __call__(self, grid: Grid, width: int, device: torch.device, first: int = 0) -> Float[Tensor, "#n d"]: ...


@dataclass(frozen=True, slots=True)
class Anywhere:
    """Nothing: tokens are turned, and what else tells where they stand is in them."""

    def __call__(self, grid: Grid, width: int, device: torch.device, first: int = 0) -> Float[Tensor, "#n d"]:
        """See `Standing`."""
        return torch.zeros(1, width, device=device)


@dataclass(frozen=True, slots=True)
class Waves:
    """Sines and cosines of the places, a third of the channels for each axis (Attention Is All You Need, arXiv 1706.03762)."""

    spread: Spread

    def __call__(self, grid: Grid, width: int, device: torch.device, first: int = 0) -> Float[Tensor, "#n d"]:
        """See `Standing`; channels that are left over are 0."""
        pairs = width // 6
        rates = _rates(pairs, self.spread.theta)
        angles = _spanned([place[:, None] * rates for place in self.spread.places(grid, first)])
        waves = torch.cat((angles.cos(), angles.sin()), -1).float()
        return F.pad(waves, (0, width - waves.shape[1])).to(device)


@dataclass(frozen=True, slots=True)
class Sines:
    """A quarter of the channels for time, then three eighths each for columns and rows, sines before cosines, as CogVideoX 2B has them.

    Places are counted and divided by `time` or `space`.
    """

    time: float = 1.0
    space: float = 1.0

    def __call__(self, grid: Grid, width: int, device: torch.device, first: int = 0) -> Float[Tensor, "#n d"]:
        """See `Standing`."""
        shares = (width // 4, 3 * width // 8, 3 * width // 8)
        places = (_counted(grid.frames, first) / self.time, _counted(grid.height) / self.space, _counted(grid.width) / self.space)
        angles = [place[:, None] * _rates(share // 2, 10000.0) for place, share in zip(places, shares, strict=True)]
        frames, rows, columns = _spanned([torch.cat((part.sin(), part.cos()), -1) for part in angles]).split(shares, -1)
        return torch.cat((frames, columns, rows), -1).float().to(device)


def _counted(size: int, first: int = 0) -> Float[Tensor, " n"]:
    return torch.arange(first, first + size, dtype=torch.float64)


def _rates(pairs: int, theta: float) -> Float[Tensor, " p"]:
    """Of each pair, falling from 1 towards 1 / theta."""
    return theta ** -(torch.arange(pairs, dtype=torch.float64) / pairs)


def _thirds(head_dim: int) -> tuple[int, int, int]:
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


def _by_axis(places: Sequence[Tensor], axes: Sequence[int], theta: float, device: torch.device) -> Rotation:
    """Each axis turns so many of a head's channels."""
    angles = _spanned([place[:, None] * _rates(wide // 2, theta) for place, wide in zip(places, axes, strict=True)])[:, None]
    return angles.cos().float().to(device), angles.sin().float().to(device)


def _spanned(parts: Sequence[Tensor]) -> Float[Tensor, "n d"]:
    """What frames, rows and columns have, side by side for every token."""
    sizes = [len(part) for part in parts]
    shapes = [[size if other == axis else 1 for other in range(3)] for axis, size in enumerate(sizes)]
    wide = [part.view(*shape, -1).expand(*sizes, -1) for part, shape in zip(parts, shapes, strict=True)]
    return torch.cat(wide, -1).flatten(0, 2)
