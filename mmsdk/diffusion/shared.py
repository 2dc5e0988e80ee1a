"""A diffusion transformer in which text and video are one sequence and share all weights but those that time scales.

CogVideoX (arXiv 2408.06072): "expert" norms, each with its own shifts, scales and gates for text and for video, and one attention over
both. It was trained to predict v of latents that keep their variance; `mmsdk.diffusion.preserving` says how that is a flow.
"""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.diffusion.attention.types import Grid
from mmsdk.diffusion.parts import Patch, Perceptron, cut, gelu, grid_of, joined, waves
from mmsdk.diffusion.preserving import Preserving
from mmsdk.diffusion.rotary import Rotary, Rotation, Standing, turned
from mmsdk.diffusion.types import Attend, Condition, Dense, Spot, Straight, Through

__all__ = ["SharedConfig", "SharedDiT"]

_QUERY_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class SharedConfig:
    """Sizes. `time_width` is the width of the embedded time, `noise` what levels of it the model was trained with."""

    channels: int
    out_channels: int
    heads: int
    head_dim: int
    layers: int
    text_width: int
    time_width: int
    rotary: Rotary
    standing: Standing
    patch: Patch
    noise: Preserving
    biased: bool = True
    eps: float = 1e-5

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class _Scene:
    """What all layers see: the grid behind its text, the time, how the video is turned, and what attends."""

    grid: Grid
    time: Float[Tensor, "b e"]
    rotation: Rotation
    attend: Attend


class SharedDiT(nn.Module):
    """Predicts the velocity of latents. `forward` gives shapes."""

    def __init__(self, config: SharedConfig) -> None:
        super().__init__()
        self.config = config
        width, patch = config.width, config.patch[0] * config.patch[1] * config.patch[2]
        self.patch, self.text = nn.Linear(config.channels * patch, width), nn.Linear(config.text_width, width)
        self.time = Perceptron(width, config.time_width)
        self.blocks = nn.ModuleList(_Block(config, number) for number in range(config.layers))
        self.norm, self.norm_out = (nn.LayerNorm(width, eps=config.eps) for _ in range(2))
        self.modulation = nn.Linear(config.time_width, 2 * width)
        self.out = nn.Linear(width, config.out_channels * patch)

    @property
    def like(self) -> Tensor:
        """See `mmsdk.diffusion.types.Transformer`."""
        return self.out.weight

    def grid(self, latents: Float[Tensor, "b c f h w"]) -> Grid:
        """See `mmsdk.diffusion.types.Transformer`."""
        return grid_of(latents, self.config.patch)

    def forward(
        self,
        latents: Float[Tensor, "b c f h w"],
        time: Float[Tensor, " b"],
        condition: Condition,
        attend: Attend = Dense(),
        through: Through = Straight(),
        first: int = 0,
    ) -> Float[Tensor, "b e f h w"]:
        """The velocity at `time`, from 0 (clean) to 1000 (noise); all text is read, padding too, as the model was trained to."""
        signal, noise, level = self.config.noise.parts(time.float() / 1000)
        a, b = (part.view(-1, 1, 1, 1, 1) for part in (signal, noise))
        # z = (1 - sigma) x + sigma noise is shorter than what the model knows
        kept = latents.float() * (a + b)
        predicted = self._predicted(kept.to(latents.dtype), level, condition, attend, through, first)
        return ((b - a) * kept + (a + b) * predicted.float()).to(predicted.dtype)

    def _predicted(
        self, kept: Tensor, level: Tensor, condition: Condition, attend: Attend, through: Through, first: int
    ) -> Float[Tensor, "b e f h w"]:
        """v = a noise - b x."""
        grid, text = self.grid(kept), self.text(condition.text.to(self.like.dtype))
        x = self.patch(cut(kept, grid, self.config.patch, self.config.channels))
        x = x + self.config.standing(grid, self.config.width, x.device, first).to(x.dtype)
        whole = self.time(waves(level.float(), self.config.width).to(x.dtype))
        rotation = self.config.rotary(grid, self.config.heads, self.config.head_dim, x.device, first)
        scene = _Scene(Grid(grid.frames, grid.height, grid.width, before=text.shape[1]), whole, rotation, attend)
        blocks = [block for block in self.blocks if isinstance(block, _Block)]
        x = through(torch.cat((text, x), 1), [partial(block, scene=scene) for block in blocks], lambda x: blocks[0].modulated(x, scene))
        shift, scale = self.modulation(F.silu(whole))[:, None].chunk(2, -1)
        x = self.norm_out(self.norm(x[:, text.shape[1] :])) * (1 + scale) + shift
        return joined(self.out(x), grid, self.config.patch, "channels_first")


class _Expert(nn.Module):
    """A norm that time shifts and scales, one way for text and another for the video, with a gate for what comes of it."""

    def __init__(self, config: SharedConfig) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(config.time_width, 6 * config.width), nn.LayerNorm(config.width, eps=config.eps)

    def forward(self, x: Float[Tensor, "b n d"], scene: _Scene) -> tuple[Float[Tensor, "b n d"], Tensor, Tensor]:
        """The tokens, and the gates of text and video."""
        shift, scale, gate, text_shift, text_scale, text_gate = self.linear(F.silu(scene.time))[:, None].chunk(6, -1)
        text, video = _split(self.norm(x), scene)
        return torch.cat((text * (1 + text_scale) + text_shift, video * (1 + scale) + shift), 1), text_gate, gate


class _Attention(nn.Module):
    def __init__(self, config: SharedConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query, self.key, self.value = (nn.Linear(config.width, config.width, bias=config.biased) for _ in range(3))
        self.out = nn.Linear(config.width, config.width)
        self.query_norm, self.key_norm = (nn.LayerNorm(config.head_dim, eps=_QUERY_EPS) for _ in range(2))

    def forward(self, x: Float[Tensor, "b n d"], scene: _Scene, number: int, layers: int) -> Float[Tensor, "b n d"]:
        made = (part(x).unflatten(2, (self.heads, -1)) for part in (self.query, self.key, self.value))
        query, keys, values = made
        query, keys = (self._turned(part, scene) for part in (self.query_norm(query), self.key_norm(keys)))
        spot = Spot(scene.grid, number, layers, self.out.weight.unflatten(1, (self.heads, -1)).transpose(0, 1))
        heads: Tensor = scene.attend(query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), spot)
        out: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return out

    def _turned(self, x: Float[Tensor, "b n h d"], scene: _Scene) -> Float[Tensor, "b n h d"]:
        text, video = _split(x, scene)
        return torch.cat((text, turned(video, scene.rotation)), 1)


class _Block(nn.Module):
    def __init__(self, config: SharedConfig, number: int) -> None:
        super().__init__()
        self.number, self.layers = number, config.layers
        self.before, self.after, self.attention = _Expert(config), _Expert(config), _Attention(config)
        self.up, self.down = nn.Linear(config.width, 4 * config.width), nn.Linear(4 * config.width, config.width)

    def forward(self, x: Float[Tensor, "b n d"], scene: _Scene) -> Float[Tensor, "b n d"]:
        normed, *gates = self.before(x, scene)
        x = x + _gated(self.attention(normed, scene, self.number, self.layers), gates, scene)
        normed, *gates = self.after(x, scene)
        return x + _gated(self.down(gelu(self.up(normed))), gates, scene)

    def modulated(self, x: Float[Tensor, "b n d"], scene: _Scene) -> Float[Tensor, "b n d"]:
        """What the attention reads."""
        normed: Tensor = self.before(x, scene)[0]
        return normed


def _split(x: Tensor, scene: _Scene) -> tuple[Tensor, Tensor]:
    """The text, and the video behind it."""
    return x[:, : scene.grid.before], x[:, scene.grid.before :]


def _gated(x: Float[Tensor, "b n d"], gates: list[Tensor], scene: _Scene) -> Float[Tensor, "b n d"]:
    return torch.cat([gate * part for gate, part in zip(gates, _split(x, scene), strict=True)], 1)
