"""The action expert: a small Gemma-shaped transformer over [prefix ; suffix], of which it computes the suffix alone.

Its stream is narrower than the decoder's, but heads and layers are as many: in every layer the suffix's queries meet the decoder's cached
keys and values beside its own [published: pi0, arXiv 2410.24164]. Norms are RMSNorm with a learned weight (pi0, SmolVLA), or adaptive
(pi0.5, arXiv 2504.16054): scale, shift and the gate of the residual come from a condition, per token where it differs within a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.attention.mask import Bias
from mmsdk.decoder.mlp import Activation, GatedMLP
from mmsdk.decoder.norm import RMSNorm
from mmsdk.decoder.rope import Rope, Rotation, Unscaled
from mmsdk.kv.types import LayerView
from mmsdk.vla.heads.prefix import Prefix
from mmsdk.vla.heads.visibility import SuffixMasks

__all__ = [
    "AdaptiveNorm",
    "Expert",
    "ExpertConfig",
    "ExpertLayer",
    "SuffixAttention",
    "SuffixRotations",
    "Watch",
    "attend",
    "unwatched",
]

# Looks on while a layer attends: (its queries, its view of the prefix, the suffix's keys, the mask over both), keys and queries turned.
Look = Callable[[Tensor, LayerView, Tensor, Bias], None]
# The same with the layer's number in front.
Watch = Callable[[int, Tensor, LayerView, Tensor, Bias], None]


def unwatched(layer: int, query: Tensor, view: LayerView, key: Tensor, mask: Bias) -> None:
    """Nobody looks on."""


_UNSEEN: Look = partial(unwatched, 0)


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """The shape of an expert; the defaults are pi0's (Gemma 300M beside Gemma 2B)."""

    width: int = 1024
    layers: int = 18
    heads: int = 8
    kv_heads: int = 1
    head_dim: int = 256
    inner: int = 4096
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    activation: Activation = "gelu_tanh"
    adaptive: bool = False


class LearnedNorm(nn.Module):
    """RMSNorm whose weight is learned; the residual after it has gate 1 and the condition is not looked at."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(width, eps)

    def forward(self, x: Float[Tensor, "b s d"], condition: Float[Tensor, "b #s d"]) -> tuple[Tensor, Tensor | float]:
        """What the layer reads, and the gate."""
        return self.norm(x), 1.0


class AdaptiveNorm(nn.Module):
    """(1 + s(c)) n(x) + b(c), and the gate g(c). The modulation [3 d, d] begins at zero, so that every layer begins as nothing."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 3 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)
        self.eps = eps

    def forward(self, x: Float[Tensor, "b s d"], condition: Float[Tensor, "b #s d"]) -> tuple[Tensor, Tensor | float]:
        """What the layer reads, and the gate."""
        scale, shift, gate = self.modulation(condition).chunk(3, dim=-1)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + scale.float()) + shift.float()).to(x.dtype), gate


class SuffixAttention(nn.Module):
    """The suffix's own queries, keys and values (one matrix, in this order), the keys and values of the prefix before its own."""

    def __init__(self, config: ExpertConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.qkv = nn.Linear(config.width, (config.heads + 2 * config.kv_heads) * config.head_dim, bias=False)
        self.o = nn.Linear(config.heads * config.head_dim, config.width, bias=False)

    def forward(
        self, x: Float[Tensor, "b s d"], view: LayerView, rotation: Rotation, mask: Bias, look: Look = _UNSEEN
    ) -> Float[Tensor, "b s d"]:
        """Attend from the suffix to [prefix ; suffix]."""
        b, s, _ = x.shape
        heads = self.qkv(x).view(b, s, -1, self.head_dim).transpose(1, 2)
        query, key, value = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        query, key = rotation(query), rotation(key)
        look(query, view, key, mask)
        seen = attend(query, view, key, value, mask)
        out: Tensor = self.o(seen.transpose(1, 2).reshape(b, s, -1))
        return out


class ExpertLayer(nn.Module):
    """Attention and feed-forward, each on the normed stream and added to it through the norm's gate."""

    def __init__(self, config: ExpertConfig) -> None:
        super().__init__()
        norm = AdaptiveNorm if config.adaptive else LearnedNorm
        self.norm1 = norm(config.width, config.norm_eps)
        self.attention = SuffixAttention(config)
        self.norm2 = norm(config.width, config.norm_eps)
        self.mlp = GatedMLP(config.width, config.inner, False, config.activation)

    def forward(
        self, x: Float[Tensor, "b s d"], condition: Float[Tensor, "b #s d"], view: LayerView, rotation: Rotation, mask: Bias, look: Look
    ) -> Float[Tensor, "b s d"]:
        """One layer of the suffix's stream."""
        read, gate = self.norm1(x, condition)
        x = x + gate * self.attention(read, view, rotation, mask, look)
        read, gate = self.norm2(x, condition)
        out: Tensor = x + gate * self.mlp(read)
        return out


class Expert(nn.Module):
    """The layers and the final norm."""

    def __init__(self, config: ExpertConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(ExpertLayer(config) for _ in range(config.layers))
        self.norm = (AdaptiveNorm if config.adaptive else LearnedNorm)(config.width, config.norm_eps)
        self._rope = Rope(config.head_dim, config.rope_theta, Unscaled())

    def forward(
        self,
        x: Float[Tensor, "b s d"],
        condition: Float[Tensor, "b #s d"],
        prefix: Prefix,
        starts: Bool[Tensor, " s"],
        watch: Watch = unwatched,
    ) -> Float[Tensor, "b s d"]:
        """The suffix after the last layer, normed. Its tokens stand at the positions after the prefix's valid ones.

        `watch` looks on while every layer attends.
        """
        rotations, masks = SuffixRotations(self._rope, x.shape[1], x.dtype), SuffixMasks(starts, x.dtype)
        for number, (layer, view, place) in enumerate(zip(self.layers, prefix.views, prefix.places, strict=True)):
            x = layer(x, condition, view, rotations.of(place), masks.of(view), partial(watch, number))
        out: Tensor = self.norm(x, condition)[0]
        return out


class SuffixRotations:
    """The rotations of a suffix behind the prefix; layers that share their places share them."""

    def __init__(self, rope: Rope, tokens: int, dtype: torch.dtype) -> None:
        self._rope, self._tokens, self._dtype = rope, tokens, dtype
        self._known: dict[int, Rotation] = {}

    def of(self, place: Int[Tensor, " b"]) -> Rotation:
        """The rotation to the positions that begin at `place`."""
        if id(place) not in self._known:
            positions = place[:, None] + torch.arange(self._tokens, device=place.device)
            self._known[id(place)] = self._rope(positions, self._dtype)
        return self._known[id(place)]


def attend(
    query: Float[Tensor, "b h s d"], view: LayerView, key: Float[Tensor, "b g s d"], value: Float[Tensor, "b g s d"], mask: Bias
) -> Float[Tensor, "b h s d"]:
    """Attention over [prefix ; suffix]. Every query sees itself, so that none sees nothing.

    The two are joined anew in each step rather than stored: the fork stays as it was, and gradients pass through the suffix.
    """
    keys, values = torch.cat((view.keys.to(key.dtype), key), dim=2), torch.cat((view.values.to(value.dtype), value), dim=2)
    return F.scaled_dot_product_attention(query, keys, values, mask.bias, enable_gqa=query.shape[1] != key.shape[1])
