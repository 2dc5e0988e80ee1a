"""The decoder: embeddings in, hidden states out, so that words and sight enter the same way.

    cache = DenseCache.allocate(config.layers, rows, config.kv_heads, config.head_dim, capacity, dtype, device)
    hidden = decoder(decoder.embed(ids), positions, cache)
    logits = decoder.logits(hidden[:, -1])

Rows of a batch may have any length: padding, left or right or in between, is where `positions` is -1, and it changes nothing for the
others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mmsdk.attention.dense import Dense
from mmsdk.attention.mask import Masks
from mmsdk.attention.mla import Latent
from mmsdk.attention.types import Attention
from mmsdk.decoder.asking import Asking
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.latent import LatentAttention
from mmsdk.decoder.launch import launches, unheard
from mmsdk.decoder.linear import Linear, product, scores
from mmsdk.decoder.mlp import GatedMLP
from mmsdk.decoder.moe import MixedMLP, Mixture
from mmsdk.decoder.norm import RMSNorm
from mmsdk.decoder.rope import Rope, Rotation, Unscaled
from mmsdk.errors import ModelError
from mmsdk.kernels.cpu import rows
from mmsdk.kernels.ops.rope import rope
from mmsdk.kv.attending import Attending
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.slots import placed
from mmsdk.kv.types import KVCache
from mmsdk.kv.unturned import UnturnedCache

__all__ = ["Decoder", "DecoderConfig", "Express", "Layer", "LayerAttention", "NoShortcut", "SelfAttention", "Shortcut", "Stepping"]

_DENSE = Dense()

Told = Callable[[str], str]
"""What messages call a tensor of a decoder, by its name here."""


@runtime_checkable
class LayerAttention(Protocol):
    """The attention of a layer, with its weights: `SelfAttention`, `mmsdk.decoder.latent.LatentAttention`. Both are modules."""

    def __call__(self, x: Float[Tensor, "b s d"], rotation: Rotation, cache: KVCache, layer: int, masks: Masks) -> Float[Tensor, "b s d"]:
        """What the normalised stream x is to be changed by; the cache then holds the new tokens in this layer."""
        ...

    def project(
        self, x: Float[Tensor, "b s d"], rotation: Rotation
    ) -> tuple[Float[Tensor, "b h s w"], Float[Tensor, "b g s w"], Float[Tensor, "b g s e"]]:
        """Queries, and what the cache holds as keys and as values: softmax(q k^T / sqrt(w)) are the weights of attention to everything."""
        ...


@runtime_checkable
class Shortcut(Protocol):
    """Another way through a whole layer, for the inputs that it takes."""

    def takes(self, x: Float[Tensor, "b s d"]) -> bool:
        """Whether this is such an input."""
        ...

    def __call__(
        self, x: Float[Tensor, "b s d"], rotation: Rotation, cache: KVCache, layer: int, masks: Masks, last: int = 0
    ) -> Float[Tensor, "b _ d"]:
        """As the layer."""
        ...


@runtime_checkable
class Express(Protocol):
    """Another way through several layers at once: the stream after them and before the last of them, or nothing where it takes not all."""

    def __call__(
        self, x: Float[Tensor, "b s d"], rotation: Rotation, cache: KVCache, layers: range, last: int
    ) -> tuple[Float[Tensor, "b _ d"], ...]:
        """The cache has made room for the tokens, each of which sees those before it; `last` as in `Decoder.run`."""
        ...


@runtime_checkable
class Stepping(Protocol):
    """Another way through a whole decode step: what it gives for a token of every row, or nothing where it takes not the cache."""

    def __call__(self, ids: Int[Tensor, " b"], cache: KVCache, scored: bool) -> tuple[Float[Tensor, "b _"], ...]:
        """Scores of the next token, or hidden states; the cache then holds the token of each row."""
        ...


@dataclass(frozen=True, slots=True)
class NoShortcut:
    """Takes nothing."""

    def takes(self, x: Float[Tensor, "b s d"]) -> bool:
        """Never."""
        return False

    def __call__(
        self, x: Float[Tensor, "b s d"], rotation: Rotation, cache: KVCache, layer: int, masks: Masks, last: int = 0
    ) -> Float[Tensor, "b _ d"]:
        """Nobody is sent here."""
        raise AssertionError("it takes nothing")


def no_express(
    x: Float[Tensor, "b s d"], rotation: Rotation, cache: KVCache, layers: range, last: int
) -> tuple[Float[Tensor, "b _ d"], ...]:
    """Takes nothing."""
    return ()


def no_stepping(ids: Int[Tensor, " b"], cache: KVCache, scored: bool) -> tuple[Float[Tensor, "b _"], ...]:
    """Takes nothing."""
    return ()


class SelfAttention(nn.Module):
    """Grouped-query attention; queries, keys and values are one matrix [(h + 2 g) d_head, d], in this order."""

    def __init__(self, config: DecoderConfig, core: Attention) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.qkv = Linear(config.width, (config.heads + 2 * config.kv_heads) * config.head_dim, bias=config.qkv_bias)
        self.o = Linear(config.heads * config.head_dim, config.width, bias=config.o_bias)
        self.q_norm: nn.Module = RMSNorm(config.head_dim, config.norm_eps, config.norm_offset) if config.qk_norm else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(config.head_dim, config.norm_eps, config.norm_offset) if config.qk_norm else nn.Identity()
        self.normed = config.qk_norm
        self.query_scale = config.query_scale
        self.core = core

    def forward(self, x: Float[Tensor, "b s d"], rotation: Rotation, cache: KVCache, layer: int, masks: Masks) -> Float[Tensor, "b s d"]:
        """Attend from the new tokens to all that the cache then holds."""
        b, s, _ = x.shape
        query, key, value = self.project(x, rotation)
        if isinstance(cache, Attending):
            seen = cache.attend(layer, query, key, value, Asking(self.core, masks, rotation))
        else:
            view = cache.append(layer, key, value)
            seen = self.core(query, view, masks.of(view))
        out: Tensor = self.o(seen.transpose(1, 2).reshape(b, s, -1))
        return out

    def project(
        self, x: Float[Tensor, "b s d"], rotation: Rotation
    ) -> tuple[Float[Tensor, "b h s e"], Float[Tensor, "b g s e"], Float[Tensor, "b g s e"]]:
        """Queries and keys, turned to their positions, and values of the normalised stream."""
        side_by_side = self.qkv(x).contiguous().view(*x.shape[:2], -1, self.head_dim)
        heads = side_by_side.transpose(1, 2)
        if not self.normed and rows.here(side_by_side) and rotation.cos.dtype == side_by_side.dtype:
            # of keys that are not turned yet the rotation is a single number
            cos, sin = (part.expand(*x.shape[:1], 1, x.shape[1], self.head_dim // 2)[:, 0] for part in (rotation.cos, rotation.sin))
            both = rows.turned(side_by_side, self.heads + self.kv_heads, cos, sin)
            query, key = both.split((self.heads, self.kv_heads), dim=1)
            return query if self.query_scale == 1 else query * self.query_scale, key, heads[:, -self.kv_heads :]
        turned, value = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        query, key = turned.split((self.heads, self.kv_heads), dim=1)
        if self.normed:
            query, key = self.q_norm(query), self.k_norm(key)
        if launches(query, key, rotation.cos) and 2 * rotation.cos.shape[-1] == self.head_dim:
            cos, sin = (part.transpose(0, 1).expand(1, len(x), -1, -1) for part in (rotation.cos, rotation.sin))
            query, key = rope(query, key, cos, sin, (self.head_dim // 2,))
        else:
            turned = torch.cat((query, key), dim=1) if self.normed else turned
            query, key = rotation(turned).split((self.heads, self.kv_heads), dim=1)
        return query if self.query_scale == 1 else query * self.query_scale, key, value

    def keys(self, x: Float[Tensor, "b s d"], rotation: Rotation) -> Float[Tensor, "b g s e"]:
        """The keys of `project` alone; of a plain matrix nothing else is multiplied."""
        if type(self.qkv) is not Linear:
            return self.project(x, rotation)[1]
        mine = slice(self.heads * self.head_dim, (self.heads + self.kv_heads) * self.head_dim)
        bias = None if self.qkv.bias is None else self.qkv.bias[mine]
        made = product(x, self.qkv.weight[mine], bias).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        return rotation(self.k_norm(made))


class Layer(nn.Module):
    """Attention and feed-forward, each on the normalised stream and added to it."""

    def __init__(self, config: DecoderConfig, core: Attention, index: int) -> None:
        super().__init__()
        self.norm1 = _norm(config)
        self.attention = _attention(config, core)
        self.norm2 = _norm(config)
        self.mlp = _feed_forward(config, index)
        self.shortcut: Shortcut = NoShortcut()
        self.post1: nn.Module = _norm(config) if config.post_norms else nn.Identity()
        self.post2: nn.Module = _norm(config) if config.post_norms else nn.Identity()

    def forward(
        self, x: Float[Tensor, "b s d"], rotation: Rotation, cache: KVCache, layer: int, masks: Masks, last: int = 0
    ) -> Float[Tensor, "b _ d"]:
        """One layer of the residual stream; behind attention, which fills the cache, only of the `last` so many tokens, of all with 0."""
        if self.shortcut.takes(x):
            return self.shortcut(x, rotation, cache, layer, masks, last)
        seen = self.attention(self.norm1(x), rotation, cache, layer, masks)
        x, normed = self._behind(x[:, -last:], self.post1(seen[:, -last:]))
        out: Tensor = x + self.post2(self.mlp(normed))
        return out

    def _behind(self, x: Float[Tensor, "b _ d"], seen: Float[Tensor, "b _ d"]) -> tuple[Float[Tensor, "b _ d"], Float[Tensor, "b _ d"]]:
        """The stream with what attention adds, and that normalised."""
        if isinstance(self.norm2, RMSNorm) and unheard(self.norm2):
            return self.norm2.behind(x, seen)
        x = x + seen
        return x, self.norm2(x)


def _norm(config: DecoderConfig) -> RMSNorm:
    return RMSNorm(config.width, config.norm_eps, config.norm_offset)


def _attention(config: DecoderConfig, core: Attention) -> SelfAttention | LatentAttention:
    return LatentAttention(config, config.attention, core) if isinstance(config.attention, Latent) else SelfAttention(config, core)


def _feed_forward(config: DecoderConfig, index: int) -> GatedMLP | MixedMLP:
    if isinstance(config.feed, Mixture) and index not in config.feed.plain:
        return MixedMLP(config.width, config.feed, config.mlp_bias)
    return GatedMLP(config.width, config.inner, config.mlp_bias, config.activation)


def by_name(name: str) -> str:
    return f"tensor {name!r}"


class Decoder(nn.Module):
    """A decoder (Llama, Qwen2 and Qwen3, DeepSeek-V2 to V3.2), made from a checkpoint by `of`. Its parameters may be trained."""

    def __init__(self, config: DecoderConfig, core: Attention = _DENSE) -> None:
        super().__init__()
        self.config = config
        # Not initialised: random numbers for the largest matrix take a second, and `of` replaces them.
        self.embedding = nn.Embedding.from_pretrained(torch.empty(config.vocabulary, config.width), freeze=False)
        self.layers = nn.ModuleList(Layer(config, core, index) for index in range(config.layers))
        self.norm = _norm(config)
        self.head: nn.Module = nn.Identity() if config.tied else Linear(config.width, config.vocabulary, bias=False)
        self.express: Express = no_express
        self.stepping: Stepping = no_stepping
        self._rope = Rope(config.rotated, config.rope_theta, config.rope_scaling, config.rope_sections)
        self._local_rope = Rope(config.rotated, config.local.theta, Unscaled(), config.rope_sections)

    @classmethod
    def of(cls, config: DecoderConfig, state: Mapping[str, Tensor], core: Attention = _DENSE, told: Told = by_name) -> "Decoder":
        """A decoder on these very tensors, which are not copied and set the dtype and the device.

        Raises ModelError where a tensor is missing, unknown or of another shape than the config says; `told` is what messages call one.
        """
        with torch.device("meta"):
            decoder = cls(config, core)
        decoder.fill(state, told)
        return decoder

    def fill(self, state: Mapping[str, Tensor], told: Told = by_name) -> None:
        """Put these very tensors into one that was made without memory. Raises as `of` does."""
        expected = {name: tensor.shape for name, tensor in self.state_dict().items()}
        for name in sorted(expected.keys() ^ state.keys()):
            raise ModelError(f"tensor {name!r} is {'missing' if name in expected else 'not part of this decoder'}")
        for name, tensor in state.items():
            if tensor.shape != expected[name]:
                raise ModelError(f"{told(name)} is {tuple(tensor.shape)}, the config says {tuple(expected[name])}")
        self.load_state_dict(state, assign=True)
        self.eval()

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return self.norm.weight.dtype

    def embed(self, ids: Int[Tensor, "b s"]) -> Float[Tensor, "b s d"]:
        """Token ids to vectors of the decoder's width."""
        embedded: Tensor = self.embedding(ids)
        return embedded if self.config.embedding_scale == 1 else embedded * self.config.embedding_scale

    def forward(
        self,
        x: Float[Tensor, "b s d"],
        positions: Int[Tensor, "b s"],
        cache: KVCache,
        mask: Bool[Tensor, "#b 1 s t"] | Float[Tensor, "#b 1 s t"] | None = None,
        last: int = 0,
    ) -> Float[Tensor, "b _ d"]:
        """Hidden states of the new tokens, or of the `last` so many columns alone, final norm applied; the cache then holds all of them.

        `positions` are rotary positions counted from 0, -1 for padding; a token sees what the cache holds at its own position and before.
        An explicit `mask` over all t entries (True or 0 where seen, False or -inf where not) takes the place of that rule. What comes
        out at padding has no meaning, but is finite.
        Where heads turn along several axes, `positions` count tokens and the cache's `shift` tells where words stand on all of the axes.
        Raises InputError for a mask of another size.
        """
        here = cache.position
        turns = (positions + cache.shift[:, None],) if self.config.rope_sections.counts else ()
        for layers in self.runs(cache):
            wanted = last if layers.stop == len(self.layers) else 0
            x, _ = self.run(x, placed(positions, here, cache.next(layers.start)), cache, layers, mask, turns, last=wanted)
        out: Tensor = self.norm(x)
        return out

    def runs(self, cache: KVCache) -> list[range]:
        """The layers in runs in which a new token stands at the same position: a single one, unless tokens were dropped midway."""
        after, count = cache.next, len(self.layers)
        starts = [layer for layer in range(count) if layer == 0 or after(layer) is not after(layer - 1)]
        return [range(*ends) for ends in zip(starts, [*starts[1:], count], strict=True)]

    def run(
        self,
        x: Float[Tensor, "b s d"],
        positions: Int[Tensor, "b s"],
        cache: KVCache,
        layers: range,
        mask: Bool[Tensor, "#b 1 s t"] | Float[Tensor, "#b 1 s t"] | None = None,
        turns: tuple[Int[Tensor, "*c b s"], ...] = (),
        deep: Sequence[Float[Tensor, "b s d"]] = (),
        reach: tuple[Int[Tensor, "b s"], ...] = (),
        last: int = 0,
    ) -> tuple[Float[Tensor, "b _ d"], Float[Tensor, "b s d"]]:
        """Part of a pass: the residual stream after these layers, and before the last of them.

        `positions` are those that the tokens have in these layers, which may count fewer tokens than the first does. Heads turn by them,
        unless `turns` holds the positions [3 b s] on each axis, or [b s] on all of them. `deep` is added after the first layers of all.
        `reach` is the last position that each token sees, where that is not its own (`mmsdk.decoder.sight`). With `last` the stream after
        the layers is that of the last so many tokens alone: of the others the last layer only makes keys and values.
        """
        cache.advance(positions, layers)
        return self.advanced(x, positions, cache, layers, mask, turns, deep, reach, last)

    def advanced(
        self,
        x: Float[Tensor, "b s d"],
        positions: Int[Tensor, "b s"],
        cache: KVCache,
        layers: range,
        mask: Bool[Tensor, "#b 1 s t"] | Float[Tensor, "#b 1 s t"] | None = None,
        turns: tuple[Int[Tensor, "*c b s"], ...] = (),
        deep: Sequence[Float[Tensor, "b s d"]] = (),
        reach: tuple[Int[Tensor, "b s"], ...] = (),
        last: int = 0,
    ) -> tuple[Float[Tensor, "b _ d"], Float[Tensor, "b s d"]]:
        """The same of tokens that the cache has been told to expect (`KVCache.advance`)."""
        local, at, before = self.config.local, turns[0] if turns else positions, x
        mass = cache.mass if isinstance(cache, DenseCache) else ()
        # a cache that turns keys itself, whenever it is read, gets them as they are
        turned = self._unturned(x) if isinstance(cache, UnturnedCache) else self.rotation(at, x.dtype)
        ways = [(turned, Masks(positions, x.dtype, mask, reach, mass=mass))]
        if local.layers:
            near = turned if isinstance(cache, UnturnedCache) else self._local_rope(at, x.dtype)
            ways.append((near, Masks(positions, x.dtype, mask, reach, local.window, mass)))
        elif mask is None and not reach and not deep and not mass:
            taken = self.express(x, ways[0][0], cache, layers, last)
            if taken:
                return taken[0], taken[1]
        for index in layers:
            rotation, masks = ways[index in local.layers]
            wanted = last if index == layers[-1] else 0
            before, x = x, self.layers[index](x, rotation, cache, index, masks, wanted)
            x = x + deep[index][:, -wanted:] if index < len(deep) else x
        return x, before

    def rotation(self, positions: Int[Tensor, "*c b s"], dtype: torch.dtype, layer: int = -1) -> Rotation:
        """What turns queries and keys to their positions, [b s] or, on each of three axes, [3 b s]; of a local layer, that layer's own."""
        return (self._local_rope if layer in self.config.local.layers else self._rope)(positions, dtype)

    def _unturned(self, x: Float[Tensor, "b s d"]) -> Rotation:
        if isinstance(self.config.attention, Latent):
            raise ModelError("latents are not kept before their rotation, for they are not all of what is turned; choose another cache")
        return Rotation.still(x)

    def logits(self, hidden: Float[Tensor, "*n d"]) -> Float[Tensor, "*n v"]:
        """Scores of the next token, in float32. Pass only the tokens that need them: the vocabulary is the largest matrix."""
        # A tied decoder has no head, unless both ends of it stand on one matrix in fewer bits.
        end = self.embedding if isinstance(self.head, nn.Identity) else self.head
        if type(end) is nn.Embedding or type(end) is Linear:
            return scores(hidden, end.weight)
        found: Tensor = end(hidden)
        return found.float()

    def among(self, rows: Sequence[int]) -> "Decoder":
        """The decoder of these rows of the batch, by their places in it: the same, unless rows have adapters (`mmsdk.decoder.adapted`)."""
        return self
