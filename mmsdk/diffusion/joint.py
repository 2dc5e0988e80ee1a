"""A diffusion transformer in which text and video are one sequence: streams of their own at first, then one for both.

HunyuanVideo (arXiv 2412.03603), after the blocks of Scaling Rectified Flow Transformers (arXiv 2403.03206): in a double block text and
video have their own weights and attend together; in a single one attention and feed-forward run side by side. Text is refined before, by a
few layers of its own. Only the video is turned, and text stands behind it; sparse attention and step caches come in as in `DiT`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.diffusion.attention.types import Grid
from mmsdk.diffusion.parts import Patch, Perceptron, cut, gelu, grid_of, joined, waves
from mmsdk.diffusion.rotary import Rotary, Rotation, turned
from mmsdk.diffusion.types import Attend, Condition, Dense, Spot, Straight, Through
from mmsdk.errors import InputError

__all__ = ["JointConfig", "JointDiT"]

_EPS, _WAVES = 1e-6, 256


@dataclass(frozen=True, slots=True)
class JointConfig:
    """Sizes. `hidden` is the width of the feed-forward; a `guided` model takes how far guidance goes as it takes the time."""

    channels: int
    out_channels: int
    heads: int
    head_dim: int
    hidden: int
    double: int
    single: int
    refining: int
    text_width: int
    pooled_width: int
    guided: bool
    rotary: Rotary
    patch: Patch = (1, 2, 2)

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class _Scene:
    """What all layers see: the grid with the text behind it, what time and text as a whole are, how the video is turned, what attends."""

    grid: Grid
    time: Float[Tensor, "b d"]
    rotation: Rotation
    attend: Attend
    layers: int

    def heads(self, parts: Sequence[Tensor], layer: int, projection: Tensor) -> Float[Tensor, "b n d"]:
        """Attention of queries, keys and values [b, n, h, d] of video and text, the heads side by side."""
        video = self.grid.video
        query, keys = (torch.cat((turned(x[:, :video], self.rotation), x[:, video:]), 1) for x in parts[:2])
        # text has a projection of its own where it has weights of its own; the video's tells of both
        spot = Spot(self.grid, layer, self.layers, projection.unflatten(1, (parts[0].shape[2], -1)).transpose(0, 1))
        out: Tensor = self.attend(query.transpose(1, 2), keys.transpose(1, 2), parts[2].transpose(1, 2), spot)
        return out.transpose(1, 2).flatten(2)


class JointDiT(nn.Module):
    """Predicts the velocity of latents. `forward` gives shapes."""

    def __init__(self, config: JointConfig) -> None:
        super().__init__()
        self.config = config
        width, patch = config.width, config.patch[0] * config.patch[1] * config.patch[2]
        self.patch = nn.Linear(config.channels * patch, width)
        self.time, self.pooled = Perceptron(_WAVES, width), Perceptron(config.pooled_width, width)
        self.guidance = Perceptron(_WAVES, width) if config.guided else nn.Identity()
        self.text = _Refiner(config)
        self.doubles = nn.ModuleList(_Double(config, number) for number in range(config.double))
        self.singles = nn.ModuleList(_Single(config, config.double + number) for number in range(config.single))
        self.modulation = nn.Linear(width, 2 * width)
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
        """The velocity at `time`, from 0 (clean) to 1000 (noise); `first` counts the clip's first frame.

        Raises InputError where the condition has no pooled text, and where texts of one batch differ in length.
        """
        if condition.pooled is None:
            raise InputError("the model takes the text as one vector, too: Condition(text, mask, pooled)", item="condition")
        grid, told = self.grid(latents), _unpadded(condition)
        x = self.patch(cut(latents, grid, self.config.patch, self.config.channels))
        whole = self.time(waves(time, _WAVES).to(x.dtype)) + self.pooled(condition.pooled.to(x.dtype))
        if self.config.guided:
            whole = whole + self.guidance(waves(torch.full_like(time, 1000 * condition.guidance), _WAVES).to(x.dtype))
        text = self.text(told.to(x.dtype), time)
        rotation = self.config.rotary(grid, self.config.heads, self.config.head_dim, x.device, first)
        behind = Grid(grid.frames, grid.height, grid.width, after=text.shape[1])
        scene = _Scene(behind, whole, rotation, attend, self.config.double + self.config.single)
        blocks = [block for block in (*self.doubles, *self.singles) if isinstance(block, _Double | _Single)]
        x = through(torch.cat((x, text), 1), [partial(block, scene=scene) for block in blocks], lambda x: blocks[0].modulated(x, scene))
        scale, shift = self.modulation(F.silu(whole))[:, None].chunk(2, -1)
        x = _normed(x[:, : grid.video]) * (1 + scale) + shift
        return joined(self.out(x), grid, self.config.patch, "channels_first")


class _Refiner(nn.Module):
    """Text among itself, gated by the time and by the mean of the text."""

    def __init__(self, config: JointConfig) -> None:
        super().__init__()
        width = config.width
        self.time, self.pooled = Perceptron(_WAVES, width), Perceptron(config.text_width, width)
        self.enter = nn.Linear(config.text_width, width)
        self.blocks = nn.ModuleList(_Refining(config) for _ in range(config.refining))

    def forward(self, text: Float[Tensor, "b t e"], time: Float[Tensor, " b"]) -> Float[Tensor, "b t d"]:
        whole = F.silu(self.time(waves(time, _WAVES).to(text.dtype)) + self.pooled(text.mean(1)))
        x: Tensor = self.enter(text)
        for block in self.blocks:
            x = block(x, whole)
        return x


class _Refining(nn.Module):
    def __init__(self, config: JointConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm, self.norm_up = (nn.LayerNorm(width, eps=_EPS) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 2 * width)

    def forward(self, x: Float[Tensor, "b t d"], whole: Float[Tensor, "b d"]) -> Float[Tensor, "b t d"]:
        gate, gate_up = self.modulation(whole)[:, None].chunk(2, -1)
        normed = self.norm(x)
        parts = (part(normed).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        x = x + gate * self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        out: Tensor = x + gate_up * self.down(F.silu(self.up(self.norm_up(x))))
        return out


class _Projections(nn.Module):
    """Queries, keys and values, the first two normed within each head."""

    def __init__(self, config: JointConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query, self.key, self.value = (nn.Linear(config.width, config.width) for _ in range(3))
        self.query_norm, self.key_norm = (nn.RMSNorm(config.head_dim, eps=_EPS) for _ in range(2))

    def forward(self, x: Float[Tensor, "b n d"]) -> tuple[Tensor, Tensor, Tensor]:
        query, keys, values = (part(x).unflatten(2, (self.heads, -1)) for part in (self.query, self.key, self.value))
        return self.query_norm(query), self.key_norm(keys), values


class _Stream(nn.Module):
    """The weights of video, or of text, in a double block."""

    def __init__(self, config: JointConfig) -> None:
        super().__init__()
        width = config.width
        self.attention, self.out = _Projections(config), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, config.hidden), nn.Linear(config.hidden, width)
        self.modulation = nn.Linear(width, 6 * width)

    def modulations(self, scene: _Scene) -> tuple[Tensor, ...]:
        """Shift, scale and gate of the attention, and of the feed-forward."""
        parts: tuple[Tensor, ...] = self.modulation(F.silu(scene.time))[:, None].chunk(6, -1)
        return parts

    def after(self, x: Float[Tensor, "b n d"], heads: Float[Tensor, "b n d"], parts: Sequence[Tensor]) -> Float[Tensor, "b n d"]:
        """What attention and the feed-forward add to the tokens."""
        _, _, gate, shift, scale, gate_up = parts
        x = x + gate * self.out(heads)
        out: Tensor = x + gate_up * self.down(gelu(self.up(_normed(x) * (1 + scale) + shift)))
        return out


class _Double(nn.Module):
    def __init__(self, config: JointConfig, number: int) -> None:
        super().__init__()
        self.number = number
        self.video, self.text = _Stream(config), _Stream(config)

    def forward(self, x: Float[Tensor, "b n d"], scene: _Scene) -> Float[Tensor, "b n d"]:
        streams, tokens = (self.video, self.text), (x[:, : scene.grid.video], x[:, scene.grid.video :])
        mods = [stream.modulations(scene) for stream in streams]
        made = [stream.attention(_normed(x) * (1 + mod[1]) + mod[0]) for stream, x, mod in zip(streams, tokens, mods, strict=True)]
        heads = scene.heads([torch.cat(parts, 1) for parts in zip(*made, strict=True)], self.number, self.video.out.weight)
        split = heads[:, : scene.grid.video], heads[:, scene.grid.video :]
        parts = zip(streams, tokens, split, mods, strict=True)
        return torch.cat([stream.after(own, attended, mod) for stream, own, attended, mod in parts], 1)

    def modulated(self, x: Float[Tensor, "b n d"], scene: _Scene) -> Float[Tensor, "b m d"]:
        """What the attention reads of the video."""
        shift, scale, *_ = self.video.modulations(scene)
        return _normed(x[:, : scene.grid.video]) * (1 + scale) + shift


class _Single(nn.Module):
    def __init__(self, config: JointConfig, number: int) -> None:
        super().__init__()
        self.number, self.width = number, config.width
        self.attention = _Projections(config)
        self.up, self.out = nn.Linear(config.width, config.hidden), nn.Linear(config.width + config.hidden, config.width)
        self.modulation = nn.Linear(config.width, 3 * config.width)

    def forward(self, x: Float[Tensor, "b n d"], scene: _Scene) -> Float[Tensor, "b n d"]:
        shift, scale, gate = self._modulations(scene)
        normed = _normed(x) * (1 + scale) + shift
        heads = scene.heads(self.attention(normed), self.number, self.out.weight[:, : self.width])
        out: Tensor = x + gate * self.out(torch.cat((heads, gelu(self.up(normed))), -1))
        return out

    def modulated(self, x: Float[Tensor, "b n d"], scene: _Scene) -> Float[Tensor, "b m d"]:
        """What the attention reads of the video."""
        shift, scale, _ = self._modulations(scene)
        return _normed(x[:, : scene.grid.video]) * (1 + scale) + shift

    def _modulations(self, scene: _Scene) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = self.modulation(F.silu(scene.time))[:, None].chunk(3, -1)
        return parts


def _normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), eps=_EPS)


def _unpadded(condition: Condition) -> Float[Tensor, "b t e"]:
    """The text without its padding, which nothing may read. Raises InputError where it stands elsewhere, or rows differ."""
    if condition.mask is None:
        return condition.text
    kept: Bool[Tensor, " t"] = condition.mask.any(0)
    # one wait for the device each pass: the shape of all that follows hangs on it
    length = int(kept.sum())
    ordered = torch.arange(len(kept), device=kept.device) < length
    if not bool((condition.mask == ordered).all()) or not length:
        raise InputError("padding stands behind the text, as much in every row; make clips of other texts one by one", item="condition")
    return condition.text[:, :length]
