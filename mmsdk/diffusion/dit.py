"""A diffusion transformer for latent video: patches with rotary positions, attention over all of them, text beside, time in the norms.

Scalable Diffusion Models with Transformers (arXiv 2212.09748), with cross-attention to text and a single time projection that each layer
adds a table to (PixArt-alpha, arXiv 2310.00426), which Wan and LTX share. What attends (`Attend`) and what runs the layers (`Through`) are
arguments: sparse attention, a memory of earlier frames and step caches come in there, and the model knows none of them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.diffusion.attention.types import Grid
from mmsdk.diffusion.rotary import Rotary, Rotation, turned
from mmsdk.errors import InputError

__all__ = ["Attend", "Condition", "Dense", "DiT", "DiTConfig", "Layer", "Spot", "Straight", "Through"]

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class DiTConfig:
    """Sizes. `patch` is frames, rows and columns of latents; `hidden` the width of the feed-forward.

    `norm` is what time scales, `cross_norm` whether text is asked by normed tokens; `order` tells whether the output of a patch has its
    channels first or last.
    """

    channels: int
    out_channels: int
    heads: int
    head_dim: int
    hidden: int
    layers: int
    text_width: int
    rotary: Rotary
    patch: tuple[int, int, int] = (1, 2, 2)
    frequencies: int = 256
    norm: Literal["layer", "rms"] = "layer"
    cross_norm: bool = True
    order: Literal["channels_first", "channels_last"] = "channels_last"
    eps: float = 1e-6
    query_eps: float = 1e-6

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Condition:
    """The text that a clip is made for, embedded; `mask` is true where there is text and not padding, none where all of it is text."""

    text: Float[Tensor, "b t e"]
    mask: Bool[Tensor, "b t"] | None = None


@dataclass(frozen=True, slots=True)
class Spot:
    """Where an attention stands: in the grid, in the layers, and the projection that its heads' outputs go through."""

    grid: Grid
    layer: int
    layers: int
    projection: Float[Tensor, "h e d"]


@runtime_checkable
class Attend(Protocol):
    """Self-attention of one layer over all tokens of a clip."""

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b h s d"], values: Float[Tensor, "b h s d"], spot: Spot
    ) -> Float[Tensor, "b h s d"]: ...


@dataclass(frozen=True, slots=True)
class Dense:
    """Every token reads every token."""

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b h s d"], values: Float[Tensor, "b h s d"], spot: Spot
    ) -> Float[Tensor, "b h s d"]:
        """See `Attend`."""
        return F.scaled_dot_product_attention(query, keys, values)


@runtime_checkable
class Through(Protocol):
    """Runs tokens through the layers, or spares itself some; `modulated` makes what the first layer's attention reads."""

    def __call__(self, x: Float[Tensor, "b n d"], layers: Sequence[Layer], modulated: Layer) -> Float[Tensor, "b n d"]: ...


@dataclass(frozen=True, slots=True)
class Straight:
    """One layer after the other."""

    def __call__(self, x: Float[Tensor, "b n d"], layers: Sequence[Layer], modulated: Layer) -> Float[Tensor, "b n d"]:
        """See `Through`."""
        for layer in layers:
            x = layer(x)
        return x


@dataclass(frozen=True, slots=True)
class _Scene:
    """What all layers see: the grid, the time (for all tokens, or each), the text and how tokens are turned."""

    grid: Grid
    time: Float[Tensor, "b #n 6 d"]
    text: Float[Tensor, "b t d"]
    mask: Bool[Tensor, "b 1 1 t"] | None
    rotation: Rotation


class DiT(nn.Module):
    """Predicts the velocity of latents. `forward` gives shapes."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        width, patch = config.width, math.prod(config.patch)
        self.patch = nn.Linear(config.channels * patch, width)
        self.time = _Perceptron(config.frequencies, width)
        self.time_out = nn.Linear(width, 6 * width)
        self.text = _Perceptron(config.text_width, width)
        self.blocks = nn.ModuleList(_Block(config, number) for number in range(config.layers))
        self.modulation = nn.Parameter(torch.randn(2, width) / width**0.5)
        self.out = nn.Linear(width, config.out_channels * patch)

    def grid(self, latents: Float[Tensor, "b c f h w"]) -> Grid:
        """The tokens that latents are cut into. Raises InputError where their sides are no multiples of a patch, or channels differ."""
        sides = latents.shape[2:]
        if latents.shape[1] != self.config.channels or any(side % size for side, size in zip(sides, self.config.patch, strict=True)):
            wanted = f"{self.config.channels} channels and sides that are multiples of {self.config.patch}"
            raise InputError(f"they are {tuple(latents.shape)}; the model takes {wanted}", item="latents")
        return Grid(*(side // size for side, size in zip(sides, self.config.patch, strict=True)))

    def forward(
        self,
        latents: Float[Tensor, "b c f h w"],
        time: Float[Tensor, " b"] | Float[Tensor, "b n"],
        condition: Condition,
        attend: Attend = Dense(),
        through: Through = Straight(),
        first: int = 0,
    ) -> Float[Tensor, "b e f h w"]:
        """The velocity at `time`, from 0 (clean) to 1000 (noise), of a clip or of each of its tokens; `first` counts its first frame."""
        grid = self.grid(latents)
        x = self.patch(self._patches(latents, grid))
        embedded = self.time(_waves(time, self.config.frequencies).to(x.dtype), F.silu)
        embedded = embedded[:, None] if time.ndim == 1 else embedded
        mask = None if condition.mask is None else condition.mask[:, None, None]
        text = self.text(condition.text.to(x.dtype), _gelu)
        rotation = self.config.rotary(grid, self.config.heads, self.config.head_dim, x.device, first)
        scene = _Scene(grid, self.time_out(F.silu(embedded)).unflatten(-1, (6, -1)), text, mask, rotation)
        blocks = [block for block in self.blocks if isinstance(block, _Block)]
        x = through(x, [_bound(block, scene, attend) for block in blocks], lambda tokens: blocks[0].modulated(tokens, scene))
        shift, scale = (self.modulation + embedded[:, :, None]).unbind(2)
        x = (F.layer_norm(x.float(), (x.shape[-1],), eps=self.config.eps) * (1 + scale) + shift).to(x.dtype)
        return self._clip(self.out(x), grid)

    def _patches(self, latents: Tensor, grid: Grid) -> Float[Tensor, "b n d"]:
        t, h, w = self.config.patch
        cut = latents.unflatten(4, (grid.width, w)).unflatten(3, (grid.height, h)).unflatten(2, (grid.frames, t))
        patches: Tensor = cut.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)
        return patches

    def _clip(self, x: Float[Tensor, "b n d"], grid: Grid) -> Float[Tensor, "b e f h w"]:
        t, h, w = self.config.patch
        x = x.unflatten(1, (grid.frames, grid.height, grid.width))
        first = self.config.order == "channels_first"
        x = x.unflatten(-1, (-1, t, h, w)) if first else x.unflatten(-1, (t, h, w, -1)).movedim(-1, 4)
        return x.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3)


class _Perceptron(nn.Module):
    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.one = nn.Linear(inner, width)
        self.two = nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "*b i"], activation: Layer) -> Float[Tensor, "*b o"]:
        out: Tensor = self.two(activation(self.one(x)))
        return out


class _Attention(nn.Module):
    """Projections with root mean square norms of queries and keys over all heads."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.query_norm, self.key_norm = (nn.RMSNorm(width, eps=config.query_eps) for _ in range(2))

    def parts(self, x: Float[Tensor, "b n d"], source: Float[Tensor, "b t d"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of `x`, keys and values of `source`, each cut into heads behind the tokens."""
        made = (self.query_norm(self.query(x)), self.key_norm(self.key(source)), self.value(source))
        query, keys, values = (part.unflatten(2, (self.heads, -1)) for part in made)
        return query, keys, values

    def projected(self, heads: Float[Tensor, "b h n d"]) -> Float[Tensor, "b n e"]:
        out: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return out


class _Block(nn.Module):
    def __init__(self, config: DiTConfig, number: int) -> None:
        super().__init__()
        self.config, self.number = config, number
        self.attention, self.cross = _Attention(config), _Attention(config)
        self.cross_norm = nn.LayerNorm(config.width, eps=config.eps) if config.cross_norm else nn.Identity()
        self.up, self.down = nn.Linear(config.width, config.hidden), nn.Linear(config.hidden, config.width)
        self.modulation = nn.Parameter(torch.randn(6, config.width) / config.width**0.5)

    def forward(self, x: Float[Tensor, "b n d"], scene: _Scene, attend: Attend) -> Float[Tensor, "b n d"]:
        shift, scale, gate, shift_up, scale_up, gate_up = self._modulations(scene)
        x = (x.float() + self._self(self._scaled(x, shift, scale), scene, attend) * gate).to(x.dtype)
        query, keys, values = (part.transpose(1, 2) for part in self.cross.parts(self.cross_norm(x), scene.text))
        x = x + self.cross.projected(F.scaled_dot_product_attention(query, keys, values, attn_mask=scene.mask))
        out: Tensor = self.down(_gelu(self.up(self._scaled(x, shift_up, scale_up))))
        return (x.float() + out.float() * gate_up).to(x.dtype)

    def modulated(self, x: Float[Tensor, "b n d"], scene: _Scene) -> Float[Tensor, "b n d"]:
        """What the self-attention reads."""
        shift, scale, *_ = self._modulations(scene)
        return self._scaled(x, shift, scale)

    def _modulations(self, scene: _Scene) -> tuple[Tensor, ...]:
        return (self.modulation + scene.time.float()).unbind(2)

    def _self(self, x: Tensor, scene: _Scene, attend: Attend) -> Float[Tensor, "b n d"]:
        query, keys, values = self.attention.parts(x, x)
        query, keys = turned(query, scene.rotation), turned(keys, scene.rotation)
        projection = self.attention.out.weight.unflatten(1, (self.config.heads, -1)).transpose(0, 1)
        spot = Spot(scene.grid, self.number, self.config.layers, projection)
        return self.attention.projected(attend(query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), spot))

    def _scaled(self, x: Tensor, shift: Tensor, scale: Tensor) -> Float[Tensor, "b n d"]:
        norm = F.layer_norm if self.config.norm == "layer" else F.rms_norm
        normed = norm(x.float(), (x.shape[-1],), eps=self.config.eps)
        return (normed * (1 + scale) + shift).to(x.dtype)


def _bound(block: _Block, scene: _Scene, attend: Attend) -> Layer:
    def layer(x: Tensor) -> Tensor:
        out: Tensor = block(x, scene, attend)
        return out

    return layer


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _waves(time: Float[Tensor, "*b"], width: int) -> Float[Tensor, "*b d"]:
    """Cosines, then sines, of the time at frequencies from 1 down to 1 / 10000."""
    rates = torch.exp(-math.log(10000) * torch.arange(width // 2, dtype=torch.float32, device=time.device) / (width // 2))
    angles = time[..., None].float() * rates
    return torch.cat((angles.cos(), angles.sin()), -1)
