"""DeepSeek-V4 (arXiv 2606.19348): a decoder whose memory has three levels, a window, entries for four tokens, entries for 128.

    cache = decoder.memory(rows, capacity)
    hidden = decoder(decoder.embed(ids), positions, cache)
    logits = decoder.logits(hidden[:, -1])

All of it published, as in transformers' deepseek_v4, without the layer that predicts one token more. Differences from a llama:

- every head reads one shared head that is key and value at once; what comes out is turned back by the query's position;
- a layer attends to its window and to its compressed past together, with a sink (`mmsdk.attention.levels`);
- heads are projected in groups, to a low rank, before they are mixed;
- four residual streams (`mmsdk.decoder.hyper`), and a mixture of experts in every layer (`mmsdk.decoder.hashed`).
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mmsdk.attention.levels import attend
from mmsdk.attention.swa import Recent
from mmsdk.decoder.compressor import Step, past_of
from mmsdk.decoder.deepseek_v4_config import DIGITS, DeepseekV4Config
from mmsdk.decoder.hashed import HashedMLP, RoutedMLP
from mmsdk.decoder.hyper import HyperConnection, HyperHead, spread
from mmsdk.decoder.linear import Linear
from mmsdk.decoder.norm import RMSNorm
from mmsdk.decoder.rope import Unscaled
from mmsdk.decoder.trailing import TrailingRope
from mmsdk.decoder.transformer import Decoder, Told, by_name, no_express
from mmsdk.errors import InputError
from mmsdk.kv.three_level import ThreeLevelCache
from mmsdk.kv.types import KVCache

__all__ = ["DeepseekV4Decoder", "SharedHeadAttention"]

# Tokens of a row that go through all layers at one time: their streams, several a token, are what a long prompt takes most of.
_PART = 2048


class SharedHeadAttention(nn.Module):
    """All query heads over one head of keys that are values too: the window, and what the layer remembers beside it."""

    def __init__(self, config: DeepseekV4Config, layer: int) -> None:
        super().__init__()
        kind, wide = config.kinds[layer], config.heads * config.head_dim
        self.layer, self.window, self.groups, self.norm_eps = layer, config.window, config.groups, config.norm_eps
        self.near = kind == "sliding"
        self.q_down = Linear(config.stream, config.query_rank, bias=False)
        self.q_norm = RMSNorm(config.query_rank, config.norm_eps)
        self.q_up = Linear(config.query_rank, wide, bias=False)
        self.kv = Linear(config.stream, config.head_dim, bias=False)
        self.kv_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.sinks = nn.Parameter(torch.zeros(config.heads))
        self.past = past_of(kind, config)
        # [(groups rank), d]: each group has a matrix of its own
        self.o_down = nn.Parameter(torch.zeros(config.groups * config.group_rank, wide // config.groups))
        self.o_up = Linear(config.groups * config.group_rank, config.stream, bias=False)

    def forward(self, x: Float[Tensor, "b s d"], step: Step) -> Float[Tensor, "b s d"]:
        """Attend from the new tokens to all that the cache then holds."""
        turn = step.near if self.near else step.far
        latent = self.q_norm(self.q_down(x))
        key = turn(self.kv_norm(self.kv(x))[:, None])
        query = turn(self._unit(self.q_up(latent).unflatten(-1, (-1, key.shape[-1])).transpose(1, 2)))
        view = step.cache.append(self.layer, key, key)
        levels = Recent.of(view, step.positions, self.window), *self.past(x, latent, step, self.layer)
        return self._out(turn.back(attend(query, levels, self.sinks)))

    def _unit(self, query: Float[Tensor, "b h s d"]) -> Float[Tensor, "b h s d"]:
        """Each head divided by its root mean square."""
        return query * torch.rsqrt(query.float().square().mean(-1, keepdim=True) + self.norm_eps).to(query.dtype)

    def _out(self, heads: Float[Tensor, "b h s d"]) -> Float[Tensor, "b s w"]:
        b, _, s, _ = heads.shape
        grouped = heads.transpose(1, 2).reshape(b * s, self.groups, -1).transpose(0, 1)
        low = torch.bmm(grouped, self.o_down.unflatten(0, (self.groups, -1)).transpose(1, 2))
        out: Tensor = self.o_up(low.transpose(0, 1).reshape(b, s, -1))
        return out


class Layer(nn.Module):
    """Attention and experts, each between the reading and the mixing of the streams."""

    def __init__(self, config: DeepseekV4Config, layer: int) -> None:
        super().__init__()
        connection = config.stream, config.streams, config.rounds, config.hyper_eps, config.norm_eps
        self.hyper1 = HyperConnection(*connection)
        self.norm1 = RMSNorm(config.stream, config.norm_eps)
        self.attention = SharedHeadAttention(config, layer)
        self.hyper2 = HyperConnection(*connection)
        self.norm2 = RMSNorm(config.stream, config.norm_eps)
        self.mlp: nn.Module = (
            HashedMLP(config.stream, config.vocabulary, config.mixture, config.clamp)
            if layer in config.hashed
            else RoutedMLP(config.stream, config.mixture, config.clamp)
        )

    def forward(self, streams: Float[Tensor, "b s n d"], step: Step) -> Float[Tensor, "b s n d"]:
        """One layer of the residual streams."""
        x, mixing = self.hyper1(streams)
        streams = mixing(streams, self.attention(self.norm1(x), step))
        x, mixing = self.hyper2(streams)
        out: Tensor = mixing(streams, self.mlp(self.norm2(x), step.ids))
        return out


class DeepseekV4Decoder(Decoder):
    """Made from a checkpoint by `made`. It takes the place of other decoders, with a memory of its own kind: see `memory`.

    `config` is what all decoders are asked about, `sizes` are its own. Hash layers choose experts by the token itself, so that a token
    enters as its vector and its id: `embed` writes the id behind the vector, as three digits in base 256, which every dtype holds exactly.
    Long prompts go through in parts, which gives the same as at once.
    """

    def __init__(self, sizes: DeepseekV4Config) -> None:
        nn.Module.__init__(self)
        self.config, self.sizes = sizes.outline, sizes
        self.embedding = nn.Embedding.from_pretrained(torch.empty(sizes.vocabulary, sizes.stream), freeze=False)
        self.layers = nn.ModuleList(Layer(sizes, layer) for layer in range(sizes.layers))
        self.hyper = HyperHead(sizes.stream, sizes.streams, sizes.hyper_eps, sizes.norm_eps)
        self.norm = RMSNorm(sizes.stream, sizes.norm_eps)
        self.head = nn.Identity() if sizes.tied else Linear(sizes.stream, sizes.vocabulary, bias=False)
        self.express = no_express
        self._near = TrailingRope(sizes.turning, sizes.theta, Unscaled())
        self._far = TrailingRope(sizes.turning, sizes.compressed_theta, sizes.compressed_scaling)

    @classmethod
    def made(cls, sizes: DeepseekV4Config, state: Mapping[str, Tensor], told: Told = by_name) -> "DeepseekV4Decoder":
        """A decoder on these very tensors, which are not copied and set the dtype and the device. Raises as `Decoder.of` does."""
        with torch.device("meta"):
            decoder = cls(sizes)
        decoder.fill(state, told)
        return decoder

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in; norms are wider."""
        return self._key.dtype

    def memory(self, rows: int, capacity: int) -> ThreeLevelCache:
        """An empty memory with room for the entries of `capacity` tokens a row; more tokens double it."""
        return ThreeLevelCache.allocate(self.sizes.plan, rows, capacity, self.dtype, self._key.device)

    def embed(self, ids: Int[Tensor, "b s"]) -> Float[Tensor, "b s d"]:
        """Token ids to vectors of the stream's width, each with the digits of its id behind it."""
        digits = torch.stack([ids // 256**place % 256 for place in range(DIGITS)], dim=-1)
        return torch.cat((self.embedding(ids), digits.to(self.dtype)), dim=-1)

    def forward(
        self,
        x: Float[Tensor, "b s d"],
        positions: Int[Tensor, "b s"],
        cache: KVCache,
        mask: Bool[Tensor, "#b 1 s t"] | Float[Tensor, "#b 1 s t"] | None = None,
        last: int = 0,
    ) -> Float[Tensor, "b _ w"]:
        """Hidden states [b s stream] of the new tokens, or of the `last` so many alone, final norm applied; the cache holds all of them.

        `positions` count a row's tokens from 0 without a gap, -1 for padding, which gives something finite without a meaning.
        Raises InputError for a cache of another kind, for a mask, and as `ThreeLevelCache.advance` does.
        """
        out: Tensor = self.norm(self.run(x, positions, cache, range(self.sizes.layers), mask, last=last)[0])
        return out

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
    ) -> tuple[Float[Tensor, "b _ w"], Float[Tensor, "b s w"]]:
        """See `Decoder.run`: of all layers at once, and both are the stream after them, since before the last one there are several."""
        if not isinstance(cache, ThreeLevelCache):
            raise InputError(f"it is a {type(cache).__name__}; DeepSeek-V4 remembers in three levels, take decoder.memory()", item="cache")
        if mask is not None:
            raise InputError("who sees what is decided by the levels; leave it out", item="mask")
        assert not (turns or deep or reach), "these are for what is seen, and this model reads text"
        assert layers == range(self.sizes.layers), "it runs whole: there is no one stream between two layers to stop at"
        parts = [self._through(*part, cache, layers) for part in zip(x.split(_PART, 1), positions.split(_PART, 1), strict=True)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return out[:, -last:], out

    def among(self, rows: Sequence[int]) -> "DeepseekV4Decoder":
        """The decoder of these rows of the batch: the same for all."""
        return self

    @property
    def _key(self) -> Tensor:
        """A matrix that is never stored in fewer bits."""
        return self.get_parameter("layers.0.attention.kv.weight")

    def _through(
        self, x: Float[Tensor, "b s d"], positions: Int[Tensor, "b s"], cache: ThreeLevelCache, layers: range
    ) -> Float[Tensor, "b s w"]:
        cache.advance(positions, layers)
        step = Step(cache, positions, self._ids(x), self._near(positions), self._far(positions), self._far)
        streams = spread(x[..., : self.sizes.stream], self.sizes.streams)
        for layer in self.layers:
            streams = layer(streams, step)
        out: Tensor = self.hyper(streams)
        return out

    def _ids(self, x: Float[Tensor, "b s d"]) -> Int[Tensor, "b s"]:
        values = torch.tensor([256**place for place in range(DIGITS)], device=x.device)
        return (x[..., self.sizes.stream :].long() * values).sum(-1).clamp(0, self.sizes.vocabulary - 1)
