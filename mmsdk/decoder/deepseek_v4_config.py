"""The shape of a DeepSeek-V4 decoder."""

import math
from dataclasses import dataclass
from typing import Literal

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.moe import Mixture
from mmsdk.decoder.rope import Scaling
from mmsdk.errors import ModelError
from mmsdk.kv.open_windows import Series
from mmsdk.kv.three_level import Plan

__all__ = ["DIGITS", "DeepseekV4Config", "Kind"]

Kind = Literal["sliding", "csa", "hca"]

# Digits in base 256 that write a token's id behind its embedding.
DIGITS = 3
_MOST = 1 << 24
_SIZES = (
    "vocabulary stream context heads head_dim turning query_rank groups group_rank index_heads index_dim index_topk window csa_rate "
    "hca_rate streams rounds layers"
).split()


@dataclass(frozen=True, slots=True)
class DeepseekV4Config:
    """Sizes and switches. `kinds` says of each layer what it remembers beside its window; the layers in `hashed` choose experts by token.

    Heads share one head of `head_dim` channels as key and value, of which the last `turning` turn: by `theta` in sliding layers, by
    `compressed_theta` under a scaling elsewhere. `query_rank` is the width that queries are made from, `groups` of heads are projected to
    `group_rank` each, `clamp` bounds what experts multiply. `streams` residual streams are mixed by `rounds` of Sinkhorn-Knopp.
    Raises ModelError for sizes that do not fit together.
    """

    vocabulary: int
    stream: int
    context: int
    kinds: tuple[Kind, ...]
    heads: int
    head_dim: int
    turning: int
    query_rank: int
    groups: int
    group_rank: int
    index_heads: int
    index_dim: int
    index_topk: int
    mixture: Mixture
    hashed: tuple[int, ...]
    theta: float
    compressed_theta: float
    compressed_scaling: Scaling
    window: int = 128
    csa_rate: int = 4
    hca_rate: int = 128
    clamp: float = 10.0
    streams: int = 4
    rounds: int = 20
    hyper_eps: float = 1e-6
    norm_eps: float = 1e-6
    tied: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if not 1 <= size <= _MOST:
                raise ModelError(f"DeepSeek-V4 config: {name} is {size}, it must be from 1 to {_MOST}")
        for name in ("theta", "compressed_theta", "clamp", "hyper_eps", "norm_eps"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ModelError(f"DeepSeek-V4 config: {name} is {value}, it must be a finite number above 0")
        if self.turning % 2 or self.turning > min(self.head_dim, self.index_dim):
            raise ModelError(f"DeepSeek-V4 config: {self.turning} channels cannot turn in heads of {self.head_dim} and {self.index_dim}")
        if self.heads % self.groups:
            raise ModelError(f"DeepSeek-V4 config: {self.heads} heads do not make {self.groups} even groups")

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.kinds)

    @property
    def width(self) -> int:
        """What a token enters the decoder as: its vector in the stream, and the digits of its id."""
        return self.stream + DIGITS

    def series(self, kind: Kind) -> tuple[Series, ...]:
        """What a layer of this kind compresses: first what it attends to, then what its indexer looks through."""
        if kind == "csa":
            return Series("csa", self.head_dim, self.csa_rate, True), Series("indexer", self.index_dim, self.csa_rate, True)
        return (Series("hca", self.head_dim, self.hca_rate, False),) if kind == "hca" else ()

    @property
    def outline(self) -> DecoderConfig:
        """What all decoders are asked about."""
        return DecoderConfig(
            vocabulary=self.vocabulary,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            kv_heads=1,
            head_dim=self.head_dim,
            inner=self.mixture.inner,
            context=self.context,
            norm_eps=self.norm_eps,
            rope_theta=self.theta,
            tied=self.tied,
            attention=self.plan,
            feed=self.mixture,
        )

    @property
    def plan(self) -> Plan:
        """What its memory must hold."""
        return Plan(self.window, self.head_dim, tuple(self.series(kind) for kind in self.kinds))
