"""The vision transformer of Qwen's vision-language models, which sees pictures and frames at their own aspect.

Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (arXiv 2502.13923) and Qwen3-VL (arXiv 2511.21631) differ by configuration alone. A patch covers a
square of two frames at once; heads turn by row and column (2-D rotary positions); a merger makes one token of each square of patches, as
wide as the language model. Qwen2.5-VL looks through windows in all but a few layers; Qwen3-VL adds learned positions and merges the states
of some earlier layers too (DeepStack, arXiv 2406.04334).

Letters: b steps of one grid, n patches in reading order, m tokens, c numbers of a patch, d width, h heads, e width of a head.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from mmsdk.errors import ModelError
from mmsdk.kernels.ops.rope import rope
from mmsdk.vision.activations import gelu_tanh, quick_gelu
from mmsdk.vision.native import Native, everywhere
from mmsdk.vision.taps import attention_mean

__all__ = ["Tower", "TowerActivation", "TowerConfig", "TowerOutput"]

TowerActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]
Grid = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """The shape of a tower. `hidden` is the width inside the MLP, `language` that of what comes out, `time` how many frames a patch covers.

    `gated` MLPs have two maps up; `rms` norms scale alone. `side` is that of the square of learned positions, 0 for none; `window` that of
    a window in patches, 0 for none, and `full` are the layers without windows. `deep` are the layers whose states are merged too.
    """

    width: int
    layers: int
    heads: int
    hidden: int
    language: int
    patch: int = 14
    time: int = 2
    merge: int = 2
    activation: TowerActivation = "gelu_tanh"
    gated: bool = False
    rms: bool = False
    patch_bias: bool = False
    side: int = 0
    window: int = 0
    full: tuple[int, ...] = ()
    deep: tuple[int, ...] = ()
    theta: float = 10_000.0

    def __post_init__(self) -> None:
        sizes = (self.width, self.layers, self.heads, self.hidden, self.language, self.patch, self.time, self.merge)
        if min(sizes) < 1 or self.width % (4 * self.heads):
            raise ModelError(f"a vision tower needs sizes of at least 1 and heads whose width divides by 4, not {self}")
        if any(not 0 <= layer < self.layers for layer in (*self.full, *self.deep)) or self.window % self.merge:
            raise ModelError(f"a vision tower of {self.layers} layers has none of {self.full} or {self.deep}, or windows that cut tokens")

    @property
    def scored(self) -> int:
        """The last layer that sees whole frames; the very last where none does."""
        return max(self.full) if self.window and self.full else self.layers - 1


@dataclass(frozen=True, slots=True)
class TowerOutput:
    """Tokens of each step, those of earlier layers, and of the last layer that sees all of a frame how much attention each receives and
    its keys before they turn: means over a token's patches."""

    features: Float[Tensor, "b m l"]
    deep: tuple[Float[Tensor, "b m l"], ...]
    saliency: Float[Tensor, "b m"]
    keys: Float[Tensor, "b m k"]


@dataclass(frozen=True, slots=True)
class Angles:
    """How the heads of each patch turn, in all rows of a batch alike or in each its own way."""

    cos: Float[Tensor, "*b n f"]
    sin: Float[Tensor, "*b n f"]

    def __call__(self, query: Float[Tensor, "b h n e"], key: Float[Tensor, "b h n e"]) -> tuple[Tensor, Tensor]:
        """Queries and keys, turned."""
        cos, sin = (table.expand(1, len(query), -1, -1) for table in (self.cos, self.sin))
        return rope(query, key, cos, sin, (self.cos.shape[-1],))


class Tower(nn.Module):
    """Patches to tokens. Runs in the dtype and on the device of its parameters."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.config = config
        size = config.time, config.patch, config.patch
        self.patch = nn.Conv3d(3, config.width, size, size, bias=config.patch_bias)
        self.position: nn.Module = nn.Embedding(config.side**2, config.width) if config.side else nn.Identity()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.merger = Merger(config, after=False)
        self.deep = nn.ModuleList(Merger(config, after=True) for _ in config.deep)

    def forward(self, patches: Float[Tensor, "b n c"], grid: Grid) -> TowerOutput:
        """Encode steps of one grid of (rows, columns) of patches."""
        config, deep = self.config, list[Tensor]()
        x, angles = self.embed(patches, grid), self.angles(*_corners(grid, self.patch.weight.device))
        saliency = keys = x.new_zeros(0)
        for number, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            windowed = config.window and number not in config.full
            x, query, key, turned = block(x, angles, grid, config.window if windowed else 0)
            if number in config.deep:
                deep.append(self.deep[config.deep.index(number)](x, grid))
            if number == config.scored:
                received = attention_mean(query, turned).mean(dim=1)
                saliency = blocks(received[..., None], grid, config.merge).mean(dim=-1)
                keys = blocks(key.transpose(1, 2).flatten(2), grid, config.merge).unflatten(-1, (config.merge**2, -1)).mean(dim=-2)
        return TowerOutput(self.merger(x, grid), tuple(deep), saliency, keys)

    def embed(self, patches: Float[Tensor, "b n c"], grid: Grid) -> Float[Tensor, "b n d"]:
        """Patches as vectors, positions added."""
        # A convolution whose stride is its kernel is one matrix product.
        x = F.linear(patches.to(self.patch.weight.dtype), self.patch.weight.flatten(1), self.patch.bias)
        return x + self.positions(grid)

    def positions(self, grid: Grid) -> Float[Tensor, "_ d"]:
        """Learned positions of a grid, bilinear between those of the learned square, whose corners are its corners; zeros without any."""
        if not isinstance(self.position, nn.Embedding):
            return self.patch.weight.new_zeros(1, self.config.width)
        plane = self.position.weight.T.unflatten(1, (self.config.side, self.config.side))[None].float()
        resampled = F.interpolate(plane, size=grid, mode="bilinear", align_corners=True)
        return resampled.flatten(2)[0].T.to(self.patch.weight.dtype)

    def angles(self, rows: Float[Tensor, "*b n"], columns: Float[Tensor, "*b n"]) -> Angles:
        """Half of a head's pairs turn by the row, half by the column, both with the same frequencies."""
        width = self.config.width // self.config.heads // 2
        frequencies = 1.0 / self.config.theta ** (torch.arange(0, width, 2, device=rows.device).float() / width)
        angles = torch.cat([place[..., None] * frequencies for place in (rows, columns)], dim=-1)
        return Angles(angles.cos(), angles.sin())


def _corners(grid: Grid, device: torch.device) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """The row and the column of each patch."""
    rows, columns = (torch.arange(size, device=device).float() for size in grid)
    return rows.repeat_interleave(grid[1]), columns.repeat(grid[0])


class Block(nn.Module):
    """Attention and MLP, each on a normalised copy and added back."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = _norm(config, config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.o = nn.Linear(config.width, config.width)
        self.norm2 = _norm(config, config.width)
        self.mlp = MLP(config)

    def forward(self, x: Float[Tensor, "b n d"], angles: Angles, grid: Grid, window: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The stream after the layer, and its queries, its keys before they turn and after [b h n e]."""
        native = self.native(x)
        query, key, value = self.inside(x, native)
        turned_query, turned = angles(query, key)
        x = self.add(x, attended(turned_query, turned, value, grid, window), native)
        return self.feed(x, native), turned_query, key, turned

    def native(self, x: Float[Tensor, "b n d"]) -> Native | None:
        """What takes its place for such a stream, if anything does."""
        if self.mlp.gated:
            return None
        return Native.of(x, (self.qkv, self.o, self.mlp.up, self.mlp.down), (self.norm1, self.norm2), (), self.mlp.kind)

    def inside(self, x: Float[Tensor, "b n d"], native: Native | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [b h n e]."""
        b, n, _ = x.shape
        qkv = self.qkv(self.norm1(x)) if native is None else native.project(x)
        query, key, value = qkv.view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return query, key, value

    def add(self, x: Float[Tensor, "b n d"], seen: Float[Tensor, "b h n e"], native: Native | None = None) -> Float[Tensor, "b n d"]:
        """The stream after attention."""
        mixed = seen.transpose(1, 2).flatten(2)
        after: Tensor = x + self.o(mixed) if native is None else native.add(x, mixed)
        return after

    def feed(self, x: Float[Tensor, "b n d"], native: Native | None = None) -> Float[Tensor, "b n d"]:
        """The stream after the MLP."""
        after: Tensor = x + self.mlp(self.norm2(x)) if native is None else native.feed(x)
        return after


class MLP(nn.Module):
    """Two linear maps around an activation; gated, a third one goes up beside the first, and their product down."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.gate: nn.Module = nn.Linear(config.width, config.hidden) if config.gated else nn.Identity()
        self.up = nn.Linear(config.width, config.hidden)
        self.down = nn.Linear(config.hidden, config.width)
        self.gated, self.kind, self.activation = config.gated, config.activation, _ACTIVATIONS[config.activation]

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """The MLP's update."""
        inside = self.activation(self.gate(x)) * self.up(x) if self.gated else self.activation(self.up(x))
        update: Tensor = self.down(inside)
        return update


class Merger(nn.Module):
    """A square of patches to one token of the language model: a norm of each patch, or of the square where it comes `after` the joining."""

    def __init__(self, config: TowerConfig, after: bool) -> None:
        super().__init__()
        joined = config.width * config.merge**2
        self.merge, self.after = config.merge, after
        self.norm = _norm(config, joined if after else config.width)
        self.up = nn.Linear(joined, joined)
        self.down = nn.Linear(joined, config.language)

    def forward(self, x: Float[Tensor, "b n d"], grid: Grid) -> Float[Tensor, "b m l"]:
        """Tokens in reading order."""
        return self.tokens(blocks(x, grid, self.merge).unflatten(2, (self.merge**2, -1)))

    def tokens(self, squares: Float[Tensor, "b m p d"]) -> Float[Tensor, "b m l"]:
        """A token of each square, whose patches stand in reading order."""
        x = self.norm(squares.flatten(2)) if self.after else self.norm(squares).flatten(2)
        token: Tensor = self.down(F.gelu(self.up(x)))
        return token


def blocks(x: Float[Tensor, "b n d"], grid: Grid, side: int) -> Float[Tensor, "b m k"]:
    """The patches of each square of `side` x `side` side by side, row by row; squares in reading order."""
    rows, columns = grid
    squares: Tensor = x.unflatten(1, (rows // side, side, columns // side, side)).transpose(2, 3).flatten(3).flatten(1, 2)
    return squares


def attended(
    query: Float[Tensor, "b h n e"], key: Float[Tensor, "b h n e"], value: Float[Tensor, "b h n e"], grid: Grid, window: int
) -> Float[Tensor, "b h n e"]:
    """Attention over each step, or within each of its windows, which are smaller at the right and the lower edge."""
    if not window or max(grid) <= window:
        return everywhere(query, key, value)
    planes = [x.unflatten(2, grid) for x in (query, key, value)]
    out = torch.empty_like(planes[0])
    for top, bottom, tall in _strips(grid[0], window):
        for left, right, wide in _strips(grid[1], window):
            q, k, v = (_windows(x[:, :, top:bottom, left:right], tall, wide) for x in planes)
            seen = F.scaled_dot_product_attention(q, k, v)
            shape = len(query), (bottom - top) // tall, (right - left) // wide
            back = seen.unflatten(2, (tall, wide)).unflatten(0, shape).permute(0, 3, 1, 4, 2, 5, 6)
            out[:, :, top:bottom, left:right] = back.flatten(4, 5).flatten(2, 3)
    return out.flatten(2, 3)


def _windows(x: Float[Tensor, "b h r c e"], tall: int, wide: int) -> Float[Tensor, "w h t e"]:
    cut = x.unflatten(3, (-1, wide)).unflatten(2, (-1, tall))
    windows: Tensor = cut.permute(0, 2, 4, 1, 3, 5, 6).flatten(4, 5).flatten(0, 2)
    return windows


def _strips(side: int, window: int) -> list[tuple[int, int, int]]:
    """A side in whole windows and what is left: from, to, and how long each window in between is."""
    whole = side // window * window
    return [strip for strip in ((0, whole, window), (whole, side, side - whole)) if strip[1] > strip[0]]


def _norm(config: TowerConfig, width: int) -> nn.Module:
    return nn.RMSNorm(width, 1e-6) if config.rms else nn.LayerNorm(width, 1e-6)


_ACTIVATIONS: Mapping[TowerActivation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"gelu": F.gelu, "gelu_tanh": gelu_tanh, "quick_gelu": quick_gelu, "silu": F.silu}
)
