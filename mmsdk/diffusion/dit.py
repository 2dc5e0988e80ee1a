"""A diffusion transformer for latent video: patches with rotary positions, attention over all of them, text beside, time in the norms.

Scalable Diffusion Models with Transformers (arXiv 2212.09748), with cross-attention to text and a single time projection that each layer
adds a table to (PixArt-alpha, arXiv 2310.00426), which Wan and LTX share. What attends (`Attend`) and what runs the layers (`Through`) are
arguments: sparse attention, a memory of earlier frames and step caches come in there, and the model knows none of them.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.diffusion.attention.types import Grid
from mmsdk.diffusion.parts import Order, Patch, Perceptron, cut, gelu, grid_of, joined, waves
from mmsdk.diffusion.rotary import Anywhere, Roaming, Rotary, Rotation, Standing, turned
from mmsdk.diffusion.types import Attend, Condition, Dense, Spot, Straight, Through
from mmsdk.errors import InputError

__all__ = ["DiT", "DiTConfig"]

_FEW = 64  # words
_LEAST = 0.05  # sigma, where a clip is so clean that its velocity is hardly to be told


@dataclass(frozen=True, slots=True)
class DiTConfig:
    """Sizes. `patch` is frames, rows and columns of latents; `hidden` the width of the feed-forward.

    `norm` is what time scales, `cross_norm` whether text is asked by normed tokens; `order` tells whether the output of a patch has its
    channels first or last. `predicts` is what the last layer gives: the velocity, or the clean clip, of which the velocity is made (Back to
    Basics, arXiv 2511.13720); such a model has the clip's channels first. A model that is shown pictures gets so many channels of each of
    its tokens, `seen_width`; 0 for none.
    """

    channels: int
    out_channels: int
    heads: int
    head_dim: int
    hidden: int
    layers: int
    text_width: int
    rotary: Rotary
    patch: Patch = (1, 2, 2)
    frequencies: int = 256
    norm: Literal["layer", "rms"] = "layer"
    cross_norm: bool = True
    order: Order = "channels_last"
    eps: float = 1e-6
    query_eps: float = 1e-6
    standing: Standing = Anywhere()
    predicts: Literal["velocity", "clip"] = "velocity"
    seen_width: int = 0

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class _Scene:
    """What all layers see: the grid, the time (for all tokens, or each), the text and how tokens are turned."""

    grid: Grid
    time: Float[Tensor, "b #n 6 d"]
    text: Float[Tensor, "b t d"]
    mask: Bool[Tensor, "b 1 1 t"] | None
    rotation: Rotation
    seen: Float[Tensor, "b m d"] | None


class DiT(nn.Module):
    """Predicts the velocity of latents. `forward` gives shapes."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        width, patch = config.width, math.prod(config.patch)
        self.patch = nn.Linear(config.channels * patch, width)
        self.time = Perceptron(config.frequencies, width)
        self.time_out = nn.Linear(width, 6 * width)
        self.text = Perceptron(config.text_width, width)
        self.sight = _Sight(config.seen_width, width) if config.seen_width else nn.Identity()
        self.blocks = nn.ModuleList(_Block(config, number) for number in range(config.layers))
        self.modulation = nn.Parameter(torch.randn(2, width) / width**0.5)
        self.out = nn.Linear(width, config.out_channels * patch)

    @property
    def like(self) -> Tensor:
        """See `Transformer`."""
        return self.modulation

    def grid(self, latents: Float[Tensor, "b c f h w"]) -> Grid:
        """See `Transformer`."""
        return grid_of(latents, self.config.patch)

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
        latents = latents if condition.beside is None else torch.cat((latents, condition.beside.to(latents.dtype)), 1)
        patches = cut(latents, grid, self.config.patch, self.config.channels)
        x = self.patch(patches)
        x = x + self.config.standing(grid, self.config.width, x.device, first).to(x.dtype)
        embedded = self.time(waves(time, self.config.frequencies).to(x.dtype))
        embedded = embedded[:, None] if time.ndim == 1 else embedded
        mask = None if condition.mask is None else condition.mask[:, None, None]
        text = self.text(condition.text.to(x.dtype), gelu)
        rotation = self._rotation(grid, condition, first)
        scene = _Scene(grid, self.time_out(F.silu(embedded)).unflatten(-1, (6, -1)), text, mask, rotation, self._seen(condition))
        blocks = [block for block in self.blocks if isinstance(block, _Block)]
        x = through(x, [partial(block, scene=scene, attend=attend) for block in blocks], lambda tokens: blocks[0].modulated(tokens, scene))
        shift, scale = (self.modulation + embedded[:, :, None]).unbind(2)
        x = (F.layer_norm(x.float(), (x.shape[-1],), eps=self.config.eps) * (1 + scale) + shift).to(x.dtype)
        out = self.out(x)
        velocity = _velocity(patches, out, time) if self.config.predicts == "clip" else out
        return joined(velocity, grid, self.config.patch, self.config.order)

    def _rotation(self, grid: Grid, condition: Condition, first: int) -> Rotation:
        rotary, device = self.config.rotary, self.like.device
        if condition.places is None:
            return rotary(grid, self.config.heads, self.config.head_dim, device, first)
        if not isinstance(rotary, Roaming) or condition.places.shape[1] != grid.frames:
            told = f"{condition.places.shape[1]} places for {grid.frames} frames"
            raise InputError(f"{told}; a model of a larger world is told one a frame, others none", item="condition")
        return rotary.placed(grid, condition.places.to(device), self.config.head_dim)

    def _seen(self, condition: Condition) -> Float[Tensor, "b m d"] | None:
        if (condition.seen is None) == bool(self.config.seen_width):
            wanted = "takes what a picture's encoder saw, Condition.seen" if self.config.seen_width else "is shown no picture"
            raise InputError(f"the model {wanted}", item="condition")
        return None if condition.seen is None else self.sight(condition.seen.to(self.like.dtype))


class _Sight(nn.Module):
    """What a picture's encoder saw, made as wide as the model."""

    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.LayerNorm(inner), nn.LayerNorm(width)
        self.one, self.two = nn.Linear(inner, inner), nn.Linear(inner, width)

    def forward(self, seen: Float[Tensor, "b m i"]) -> Float[Tensor, "b m d"]:
        out: Tensor = self.leave(self.two(F.gelu(self.one(self.enter(seen)))))
        return out


class _Seen(nn.Module):
    """Keys and values of a picture, which are asked beside those of the text."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.key, self.value = (nn.Linear(config.width, config.width) for _ in range(2))
        self.key_norm = nn.RMSNorm(config.width, eps=config.query_eps)

    def forward(self, query: Float[Tensor, "b h n d"], seen: Float[Tensor, "b m w"]) -> Float[Tensor, "b h n d"]:
        made = (self.key_norm(self.key(seen)), self.value(seen))
        keys, values = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in made)
        return F.scaled_dot_product_attention(query, keys, values)


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
        self.seen = _Seen(config) if config.seen_width else nn.Identity()
        self.cross_norm = nn.LayerNorm(config.width, eps=config.eps) if config.cross_norm else nn.Identity()
        self.up, self.down = nn.Linear(config.width, config.hidden), nn.Linear(config.hidden, config.width)
        self.modulation = nn.Parameter(torch.randn(6, config.width) / config.width**0.5)

    def forward(self, x: Float[Tensor, "b n d"], scene: _Scene, attend: Attend) -> Float[Tensor, "b n d"]:
        shift, scale, gate, shift_up, scale_up, gate_up = self._modulations(scene)
        x = (x.float() + self._self(self._scaled(x, shift, scale), scene, attend) * gate).to(x.dtype)
        query, keys, values = (part.transpose(1, 2) for part in self.cross.parts(self.cross_norm(x), scene.text))
        heads = _asked(query, keys, values, scene.mask)
        heads = heads if scene.seen is None else heads + self.seen(query, scene.seen)
        x = x + self.cross.projected(heads)
        out: Tensor = self.down(gelu(self.up(self._scaled(x, shift_up, scale_up))))
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


def _asked(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Float[Tensor, "b h n d"]:
    """What tokens read of the text. On a processor plain products make a gradient of few words in a third of the fused one's time."""
    few = mask is None and keys.shape[2] <= _FEW and query.device.type == "cpu"
    if not few or not torch.is_grad_enabled():
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    out: Tensor = ((query * query.shape[3] ** -0.5) @ keys.transpose(2, 3)).softmax(-1).to(values.dtype) @ values
    return out


def _velocity(noisy: Float[Tensor, "b n d"], clean: Float[Tensor, "b n d"], time: Tensor) -> Float[Tensor, "b n d"]:
    """What leads from a noisy patch to the clean one: their difference over sigma."""
    sigma = (time.float() / 1000).clamp_min(_LEAST).view(len(noisy), -1, 1)
    return ((noisy.float() - clean.float()) / sigma).to(clean.dtype)
