"""One vision transformer for the families that share its shape: DINOv2, CLIP and SigLIP differ by configuration alone.

DINOv2 (arXiv 2304.07193) has a class token and layer scale, its giant size SwiGLU; CLIP (arXiv 2103.00020) a class token, a norm
before the first layer and quick GELU; SigLIP (arXiv 2303.15343) no class token and tanh GELU. Attention is fused (SDPA) in every case;
what compressors need from inside is read through `Taps`.

Letters: b rows of the batch, n patch tokens, p class tokens (1 or 0), d width, h heads, e width of a head, s tokens of packed rows,
k of these with what fills them up.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from mmsdk.errors import InputError, ModelError
from mmsdk.vision.activations import gelu_tanh, quick_gelu, swiglu
from mmsdk.vision.native import Native, everywhere
from mmsdk.vision.packed import Rows, attention, filled, received
from mmsdk.vision.prune import Pruning, View
from mmsdk.vision.shorten import WHOLE, Groups, Inside, Shortening
from mmsdk.vision.taps import NOTHING, PackedRecorder, Recorder, Taps, TapValues

__all__ = ["ViT", "ViTConfig", "ViTOutput"]

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu"]


@dataclass(frozen=True, slots=True)
class ViTConfig:
    """The shape of a vision transformer; the defaults are DINOv2-small.

    `grid` is the side of the square grid of learned positions, in patches; other grids are interpolated. `hidden` is the width inside
    the MLP (of each of the two halves for "swiglu").
    """

    width: int = 384
    layers: int = 12
    heads: int = 6
    hidden: int = 1536
    patch: int = 14
    grid: int = 37
    class_token: bool = True
    layer_scale: bool = True
    norm_first: bool = False
    patch_bias: bool = True
    activation: Activation = "gelu"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        sizes = (self.width, self.layers, self.heads, self.hidden, self.patch, self.grid)
        if min(sizes) < 1 or self.width % self.heads:
            raise ModelError(f"a vision transformer needs sizes of at least 1 and a width that its heads divide, not {self}")


@dataclass(frozen=True, slots=True)
class ViTOutput:
    """Patch tokens after the final norm, the class token after the final norm (p = 1, or 0), and what was tapped.

    Patch tokens are in rows of the grid, or as `groups` says where the transformer was shortened; where rows were pruned to different
    lengths, zeros stand behind the shorter ones.
    """

    tokens: Float[Tensor, "b n d"]
    cls: Float[Tensor, "b p d"]
    taps: TapValues
    groups: Groups


class ViT(nn.Module):
    """Pixels to patch tokens. Runs in the dtype and on the device of its parameters."""

    def __init__(self, config: ViTConfig = ViTConfig()) -> None:
        super().__init__()
        self.config = config
        first = int(config.class_token)
        self.patch = nn.Conv2d(3, config.width, config.patch, config.patch, bias=config.patch_bias)
        self.cls = nn.Parameter(torch.zeros(first, config.width))
        self.position = nn.Parameter(torch.randn(first + config.grid**2, config.width) * 0.02)
        self.norm_first = nn.LayerNorm(config.width, config.eps) if config.norm_first else nn.Identity()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, config.eps)

    def forward(self, pixels: Float[Tensor, "b 3 h w"], taps: Taps = NOTHING, shortening: Shortening | Pruning = WHOLE) -> ViTOutput:
        """Encode normalised pixels whose sides are multiples of the patch, on fewer and fewer tokens where `shortening` says so.

        Raises InputError for other sides, ModelError for a tap on a layer that does not exist and a pruning made for another transformer.
        """
        if isinstance(shortening, Pruning):
            return self._pruned(self.norm_first(self.embed(pixels)), taps, shortening)
        recorder = Recorder(taps, self.config.layers)
        x, first = self.norm_first(self.embed(pixels)), self.cls.shape[0]
        groups = Groups.of(x, first)
        for area in shortening.area:
            view = pixels.shape[2] // self.config.patch, pixels.shape[3] // self.config.patch
            x, groups = Groups.begin(x, first, area, area.order(view, x.device))
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            before, count = groups, shortening.counts[i] if shortening.counts else groups.count
            native = block.native(x)
            x, query, key = block.attend(x, before.bias, native)
            if count < before.count:
                groups = before.joined(before.target(shortening.by, Inside(x, query, key, before.size, before.first), count), count)
                x = before.carry(x, groups)
            x = block.feed(x, native)
            recorder(i, query, key, x, before, groups)
        x = self.norm(x)
        return ViTOutput(x[:, groups.first :], x[:, :first], recorder.values(groups), groups)

    def _pruned(self, stream: Float[Tensor, "b n d"], taps: Taps, pruning: Pruning) -> ViTOutput:
        """The blocks over rows that an agent makes shorter, each by itself."""
        (b, full, _), first, depth = stream.shape, self.cls.shape[0], self.config.layers
        recorder = PackedRecorder(taps, depth)
        agent = pruning.by.agent(stream, depth, first, pruning.most, pruning.exact)
        x, rows = stream.flatten(0, 1), Rows.of(b, full, first, stream.device)
        query, key, ran = x[:0, None], x[:0, None], stream.new_empty(b * full, dtype=torch.float32)
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            if i in agent.blocks:
                count = len(rows.token)
                ran[rows.token] = i
                index, rows = rows.narrowed(agent(View(i, depth, x[:count], received(query, key, rows), rows)))
                x = x if len(index) == count else filled(x[index])
            native = block.native(x)
            x, query, key = block.attend_rows(x, rows, native)
            x = block.feed(x, native)
            recorder(i, query, key, x[: len(rows.token)], rows)
        ran[rows.token] = depth
        states = rows.padded(self.norm(x[: len(rows.token)]))
        groups = Groups.pruned(rows, (ran / depth).unflatten(0, (b, full))[:, first:])
        return ViTOutput(states[:, first:], states[:, :first], recorder.values(rows), groups)

    def embed(self, pixels: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b s d"]:
        """Patches as vectors, the class token before them, positions added."""
        b, _, height, width = pixels.shape
        size = self.config.patch
        gh, gw = height // size, width // size
        if not gh or not gw or height % size or width % size:
            raise InputError(f"pixels of {width}x{height} do not divide into patches of {size}; resize them by Preprocess", item="pixels")
        # A convolution whose stride is its kernel is one matrix product, and that is three times as fast on a CPU.
        patches = pixels.to(self.position.dtype).view(b, 3, gh, size, gw, size).permute(0, 2, 4, 1, 3, 5).reshape(b, gh * gw, -1)
        x = F.linear(patches, self.patch.weight.flatten(1), self.patch.bias)
        return torch.cat((self.cls.expand(b, -1, -1), x), dim=1) + self.positions(gh, gw)

    def positions(self, gh: int, gw: int) -> Float[Tensor, "s d"]:
        """Learned positions for a grid of gh x gw patches: as they are on the learned grid, else bicubic (in float32, no antialias)."""
        side, first = self.config.grid, self.cls.shape[0]
        if gh == gw == side:
            return self.position
        plane = self.position[first:].view(1, side, side, -1).permute(0, 3, 1, 2).float()
        plane = F.interpolate(plane, size=(gh, gw), mode="bicubic", align_corners=False).to(self.position.dtype)
        return torch.cat((self.position[:first], plane.flatten(2)[0].T))


class Block(nn.Module):
    """Attention and MLP, each on a normalised copy and added back."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width = config.width
        add = ScaledAdd if config.layer_scale else Add
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(width, config.eps)
        self.qkv = nn.Linear(width, 3 * width)
        self.o = nn.Linear(width, width)
        self.add1 = add(width)
        self.norm2 = nn.LayerNorm(width, config.eps)
        self.mlp = MLP(config)
        self.add2 = add(width)

    def native(self, x: Float[Tensor, "*b d"]) -> Native | None:
        """What takes its place for such a stream, if anything does."""
        scales = (self.add1.scale, self.add2.scale) if isinstance(self.add1, ScaledAdd) and isinstance(self.add2, ScaledAdd) else ()
        return Native.of(x, (self.qkv, self.o, self.mlp.up, self.mlp.down), (self.norm1, self.norm2), scales, self.mlp.kind)

    def attend(
        self, x: Float[Tensor, "b n d"], bias: Float[Tensor, "b n"] | None, native: Native | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The stream after attention [b n d], and the layer's queries and keys [b h n e]; `bias` is added to each key's scores."""
        b, n, d = x.shape
        qkv = self.qkv(self.norm1(x)) if native is None else native.project(x)
        query, key, value = qkv.view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = everywhere(query, key, value, bias).transpose(1, 2).reshape(b, n, d)
        return self.add1(x, self.o(mixed)) if native is None else native.add(x, mixed), query, key

    def attend_rows(self, x: Float[Tensor, "k d"], rows: Rows, native: Native | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The same for packed rows, filled or not: the stream [k d], queries and keys [s h e] of what is no filling."""
        qkv = self.qkv(self.norm1(x)) if native is None else native.project(x)
        query, key, value = qkv[: len(rows.token)].unflatten(1, (3, self.heads, -1)).unbind(1)
        mixed = attention(query, key, value, rows).flatten(1)
        mixed = mixed if len(mixed) == len(x) else filled(mixed)
        return self.add1(x, self.o(mixed)) if native is None else native.add(x, mixed), query, key

    def feed(self, x: Float[Tensor, "*b d"], native: Native | None = None) -> Float[Tensor, "*b d"]:
        """The stream after the MLP."""
        out: Tensor = self.add2(x, self.mlp(self.norm2(x))) if native is None else native.feed(x)
        return out


class MLP(nn.Module):
    """Two linear maps around an activation; for SwiGLU the first gives gate and value side by side."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.hidden * (2 if config.activation == "swiglu" else 1))
        self.down = nn.Linear(config.hidden, config.width)
        self.kind, self.activation = config.activation, _ACTIVATIONS[config.activation]

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """The MLP's update."""
        update: Tensor = self.down(self.activation(self.up(x)))
        return update


class Add(nn.Module):
    """A residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, x: Tensor, update: Tensor) -> Tensor:
        """x + update."""
        return x + update


class ScaledAdd(nn.Module):
    """A residual connection with a learned scale per channel (layer scale, arXiv 2103.17239)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, update: Tensor) -> Tensor:
        """x + scale * update, in one pass."""
        return torch.addcmul(x, update, self.scale)


_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "swiglu": swiglu,
}
