"""What a small policy makes of visual tokens and words before its action expert reads them: a resampler, and a small decoder behind it.

A Perceiver resampler (Alayrac et al., arXiv 2204.14198) looks at the tokens of all cameras with a few learned queries, which already know
the instruction; what they saw, and where it is, goes through a decoder both ways, whose keys and values the expert then reads.
Any number of tokens can be looked at, for each says by itself where it stands: that is what lets a compressor drop or merge them.

Where things are is an output of its own, learned from the simulation's truth in training and read by the policy as one more token: without
it fifty demonstrations a task are too few to find out which handful of pixels matters. This arrangement is ours: no paper's numbers apply.

Letters: b rows, n visual tokens of all cameras, k numbers of a token, p of its place, s words, e numbers of a word, q queries, w width.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.mlp import GatedMLP
from mmsdk.decoder.norm import RMSNorm
from mmsdk.decoder.transformer import Decoder

__all__ = ["Glance", "GlanceConfig", "Gleaned"]


@dataclass(frozen=True, slots=True)
class GlanceConfig:
    """Sizes. Visual tokens come `vision` wide and are first reduced to `kept` numbers; `where` numbers say where things are."""

    vision: int = 768
    kept: int = 128
    place: int = 30
    words: int = 576
    width: int = 96
    heads: int = 3
    inner: int = 288
    queries: int = 12
    looks: int = 2
    layers: int = 3
    where: int = 12

    @property
    def decoder(self) -> DecoderConfig:
        """The decoder behind the resampler. Its words are embedded elsewhere."""
        sizes = self.heads, self.heads, self.width // self.heads
        return DecoderConfig(1, self.width, self.layers, *sizes, self.inner, 512, tied=True, activation="gelu_tanh")


class Gleaned(NamedTuple):
    """The prefix as it goes into the decoder, and where things are."""

    embeddings: Float[Tensor, "b t w"]
    where: Float[Tensor, "b o"]


class Look(nn.Module):
    """One look of the queries at the tokens: cross-attention and feed-forward, each on the normed stream and added to it."""

    def __init__(self, config: GlanceConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1, self.norm2 = RMSNorm(width, 1e-6), RMSNorm(width, 1e-6)
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.mlp = GatedMLP(width, config.inner, False, "gelu_tanh")

    def forward(self, x: Float[Tensor, "b q w"], seen: Float[Tensor, "b n w"], shown: Bool[Tensor, "b 1 1 n"]) -> Float[Tensor, "b q w"]:
        """The queries after it."""
        query, key, value = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q(self.norm1(x)), *self.kv(seen).chunk(2, dim=-1))
        )
        looked = F.scaled_dot_product_attention(query, key, value, shown)
        x = x + self.o(looked.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Glance(nn.Module):
    """Everything that is learned in front of the action expert; `centre` and `axes` are set once, from the features of the training set."""

    centre: Tensor
    axes: Tensor

    def __init__(self, config: GlanceConfig = GlanceConfig()) -> None:
        super().__init__()
        width = config.width
        self.config = config
        self.register_buffer("centre", torch.zeros(config.vision))
        self.register_buffer("axes", torch.zeros(config.kept, config.vision))
        self.up = nn.Linear(config.kept + config.place, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.seen_norm = RMSNorm(width, 1e-6)
        self.nothing = nn.Parameter(torch.zeros(width))
        self.queries = nn.Parameter(torch.randn(config.queries, width) * 0.02)
        self.asked = nn.Linear(config.words, width)
        self.looks = nn.ModuleList(Look(config) for _ in range(config.looks))
        self.where = nn.Sequential(nn.Linear(config.queries * width, 2 * width), nn.GELU(), nn.Linear(2 * width, config.where))
        self.where_in = nn.Sequential(nn.Linear(config.where, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.decoder = Decoder(config.decoder)
        nn.init.zeros_(self.decoder.embedding.weight)

    def reduced(self, features: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n k"]:
        """An encoder's features in the directions that tell the training set's tokens apart."""
        return F.linear(features.float() - self.centre, self.axes)

    def forward(
        self,
        tokens: Float[Tensor, "b n k"],
        places: Float[Tensor, "b n p"],
        shown: Bool[Tensor, "b n"],
        words: Float[Tensor, "b s e"],
        said: Bool[Tensor, "b s"],
    ) -> Gleaned:
        """From reduced tokens, which count where `shown`, and the embeddings of words, which count where `said`."""
        b = tokens.shape[0]
        seen = self.down(F.gelu(self.up(torch.cat((tokens, places), dim=-1))))
        # something is there to be looked at even where no camera is
        seen = self.seen_norm(torch.cat((seen, self.nothing.expand(b, 1, -1).to(seen.dtype)), dim=1))
        open_to = F.pad(shown, (0, 1), value=True)[:, None, None]
        share = said[..., None] / said.sum(1).clamp_min(1)[:, None, None]
        x = self.queries + self.asked((words * share).sum(1))[:, None]
        for look in self.looks:
            x = look(x, seen, open_to)
        where = self.where(x.flatten(1))
        return Gleaned(torch.cat((x, self.where_in(where)[:, None]), dim=1), where.float())
