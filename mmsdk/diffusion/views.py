"""A transformer over several views of a scene, in turn within each view and over all of them: what ReSS was made for.

VGGT: Visual Geometry Grounded Transformer (arXiv 2503.11651), its aggregator. Published: each view is patches with a camera token and four
register tokens before them, which the first view has of its own; layers attend within a view, then over all views, both with normed
queries and keys, rotary places of rows and columns (special tokens at the origin, patches from 1 on) and scaled residuals; what both give
is handed on side by side. VGGT's own code gives the same tokens (tests/diffusion/views_golden.json). Reconstruction: patches enter by one
linear map, where VGGT has a whole DINOv2 before it, and there are no heads for cameras, depths and points: this is the attention's class
at any size, without weights.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.diffusion.attention.attend import attend
from mmsdk.diffusion.attention.methods.ress import Ress
from mmsdk.diffusion.rotary import Rotation, turned
from mmsdk.errors import InputError

__all__ = ["AcrossViews", "DenseViews", "RestoredViews", "Views", "ViewsConfig"]

_EPS = 1e-5


@runtime_checkable
class AcrossViews(Protocol):
    """Attention over the tokens of all views; `special` are cameras and registers, `projection` the output's, cut by heads."""

    def __call__(
        self,
        query: Float[Tensor, "b h s d"],
        keys: Float[Tensor, "b h s d"],
        values: Float[Tensor, "b h s d"],
        special: Bool[Tensor, " s"],
        projection: Float[Tensor, "h e d"],
    ) -> Float[Tensor, "b h s d"]: ...


@dataclass(frozen=True, slots=True)
class DenseViews:
    """Every token reads every token."""

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, special: Tensor, projection: Tensor) -> Float[Tensor, "b h s d"]:
        """See `AcrossViews`."""
        return F.scaled_dot_product_attention(query, keys, values)


@dataclass(frozen=True, slots=True)
class RestoredViews:
    """ReSS; blocks with special tokens are read by all and read all."""

    method: Ress = Ress()

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, special: Tensor, projection: Tensor) -> Float[Tensor, "b h s d"]:
        """See `AcrossViews`."""
        return attend(query, keys, values, self.method.selection(query, keys, values, projection, special))


@dataclass(frozen=True, slots=True)
class ViewsConfig:
    """Sizes; the defaults are VGGT's. `layers` counts pairs of one within the views and one across them."""

    heads: int = 16
    head_dim: int = 64
    layers: int = 24
    patch: int = 14
    registers: int = 4
    wider: int = 4
    theta: float = 100.0
    scaled: float = 0.01

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.heads * self.head_dim

    @property
    def special(self) -> int:
        """Tokens of a view before its patches."""
        return 1 + self.registers


class Views(nn.Module):
    """Tokens of all views, each told of the others."""

    def __init__(self, config: ViewsConfig) -> None:
        super().__init__()
        if config.head_dim % 4:
            raise InputError(f"heads of {config.head_dim} channels; rows and columns turn pairs, a half of them each", item="head_dim")
        self.config = config
        self.patch = nn.Linear(3 * config.patch**2, config.width)
        # those of the first view, and those of all others
        self.special = nn.Parameter(1e-6 * torch.randn(2, config.special, config.width))
        self.within, self.across = (nn.ModuleList(_Block(config) for _ in range(config.layers)) for _ in range(2))

    def forward(self, pictures: Float[Tensor, "b v 3 h w"], attend: AcrossViews = DenseViews()) -> Float[Tensor, "b v n e"]:
        """The last layers' tokens, [camera, registers, patches], what the one within and the one across gave side by side.

        Raises InputError for sides that patches do not divide.
        """
        b, v, _, height, width = pictures.shape
        size, kept = self.config.patch, self.config.special
        if height % size or width % size:
            raise InputError(f"{height} x {width} pixels; patches are of {size} x {size}", item="pictures")
        patches = F.unfold(pictures.flatten(0, 1), size, stride=size).transpose(1, 2)
        special = torch.cat((self.special[:1], self.special[1:].expand(v - 1, -1, -1))).expand(b, -1, -1, -1)
        x = torch.cat((special.flatten(0, 1), self.patch(patches)), 1)
        tokens = x.shape[1]
        rotation = _rotation(height // size, width // size, self.config, x)
        everywhere = tuple(part.repeat(v, 1, 1) for part in rotation)
        flags = (torch.arange(v * tokens, device=x.device) % tokens) < kept
        dense, one = DenseViews(), x
        for inside, outside in zip(self.within, self.across, strict=True):
            one = inside(x, rotation, dense, flags[:tokens])
            x = outside(one.view(b, v * tokens, -1), everywhere, attend, flags).view(b * v, tokens, -1)
        return torch.cat((one, x), -1).view(b, v, tokens, -1)


class _Block(nn.Module):
    def __init__(self, config: ViewsConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm, self.norm_up = (nn.LayerNorm(width, eps=_EPS) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.query_norm, self.key_norm = (nn.LayerNorm(config.head_dim, eps=_EPS) for _ in range(2))
        self.up, self.down = nn.Linear(width, config.wider * width), nn.Linear(config.wider * width, width)
        self.scale, self.scale_up = (nn.Parameter(torch.full((width,), config.scaled)) for _ in range(2))

    def forward(self, x: Float[Tensor, "b n e"], rotation: Rotation, attend: AcrossViews, special: Tensor) -> Float[Tensor, "b n e"]:
        normed = self.norm(x)
        query, keys, values = (part(normed).unflatten(2, (self.heads, -1)) for part in (self.query, self.key, self.value))
        query, keys = turned(self.query_norm(query), rotation), turned(self.key_norm(keys), rotation)
        projection = self.out.weight.unflatten(1, (self.heads, -1)).transpose(0, 1)
        seen = attend(query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), special, projection)
        x = x + self.scale * self.out(seen.transpose(1, 2).flatten(2))
        out: Tensor = x + self.scale_up * self.down(F.gelu(self.up(self.norm_up(x))))
        return out


def _rotation(rows: int, columns: int, config: ViewsConfig, like: Tensor) -> Rotation:
    """Half of a head's channels turn by the row and half by the column, from 1 on; special tokens are not turned."""
    pairs = config.head_dim // 4
    rates = config.theta ** -(torch.arange(pairs) / pairs)
    at = torch.cartesian_prod(torch.arange(1, rows + 1), torch.arange(1, columns + 1)).float()
    angles = F.pad((at[:, :, None] * rates).flatten(1), (0, 0, config.special, 0))[:, None]
    return angles.cos().to(like.device), angles.sin().to(like.device)
