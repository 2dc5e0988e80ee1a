"""Multi-head latent attention: one small latent of each token stands for the keys and values of all heads (DeepSeek-V2, arXiv 2405.04434).

    c = norm(W_DKV x)            a token's latent, 512 numbers
    r = RoPE(W_KR x)             one rotated key of 64 numbers that all heads share: decoupled, as W_UK c could not be rotated later
    k_h = [W_UK,h c ; r],   v_h = W_UV,h c,   q_h = [q_nope,h ; RoPE(q_rope,h)]

Only [c ; r] is cached. It can be attended to in two ways, which are the same product in another order:

    expanded    s = q_nope . (W_UK c) + q_rope . r          keys and values of every head made from the latents, then plain attention
    absorbed    s = (W_UK^T q_nope) . c + q_rope . r        the query goes into the latents' space, out = W_UV sum_j p_j c_j

Absorbed attention reads a token's 576 numbers once for all heads, and is what decoding wants; for many queries at once, making the keys
and values costs less. `Latent.absorbs` tells by the count of products. [published] all of it but that rule, which is ours.
"""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.attention.dsa import Lightning
from mmsdk.attention.mask import Bias, Everything, Mask, side_by_side, sliced
from mmsdk.errors import ModelError
from mmsdk.kernels.ops.mla_decode import mla_decode
from mmsdk.kv.types import PagedView, View

__all__ = ["AllSeen", "Latent"]

# Scores of a slice of queries that may exist at one time: 64 MiB in float32.
_SLICE = 2**24
_MOST = 1 << 16


@dataclass(frozen=True, slots=True)
class AllSeen:
    """No choice among the entries, and nothing of it in the cache."""

    width: int = 0


@dataclass(frozen=True, slots=True)
class Latent:
    """The sizes of the attention, and the attention to latents itself.

    `q_rank` is the rank that queries come through, 0 where they come straight from the stream; `kv_rank` the width of a latent; `nope` and
    `rope` the channels of a head without and with rotation, the latter in pairs side by side where `interleaved`; `value` those of its
    value. `sharpness` multiplies the scores (YaRN's m^2), and `indexer` chooses what a query reads (`mmsdk.attention.dsa`).
    Raises ModelError for sizes that cannot be.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    interleaved: bool = True
    sharpness: float = 1.0
    indexer: AllSeen | Lightning = field(default_factory=AllSeen)

    def __post_init__(self) -> None:
        for name, least in (("q_rank", 0), ("kv_rank", 1), ("nope", 1), ("rope", 2), ("value", 1)):
            size = getattr(self, name)
            if not least <= size <= _MOST:
                raise ModelError(f"latent attention: {name} is {size}, it must be from {least} to {_MOST}")
        if self.rope % 2:
            raise ModelError(f"latent attention: rope is {self.rope}; rotary positions need an even number of channels")
        if self.value > self.head:
            raise ModelError(f"latent attention: values of {self.value} channels are wider than keys of {self.head}")
        if isinstance(self.indexer, Lightning) and not (self.q_rank and self.rope <= self.indexer.width):
            raise ModelError("latent attention: an indexer needs queries of low rank, and heads no narrower than what is rotated of them")

    @property
    def head(self) -> int:
        """Channels of a query."""
        return self.nope + self.rope

    @property
    def width(self) -> int:
        """Numbers of a token that are cached, in each layer: the latent and the rotated key."""
        return self.kv_rank + self.rope

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return self.sharpness / math.sqrt(self.head)

    def absorbs(self, queries: int) -> bool:
        """Whether so many new tokens of a row take fewer products in the latents' space, for each head and each cached token."""
        absorbed = queries * (self.width + self.kv_rank)
        expanded = queries * (self.head + self.value) + self.kv_rank * (self.nope + self.value)
        return absorbed < expanded

    def __call__(self, query: Float[Tensor, "b h s w"], view: View, mask: Mask) -> Float[Tensor, "b h s r"]:
        """softmax(scale q [c ; r]^T) c: for each query the mixture of latents; 0 for one that sees nothing.

        The queries are absorbed, [W_UK^T q_nope ; q_rope]. The mask must be of this view, as `Masks.of` gives it.
        """
        if isinstance(view, PagedView):
            if query.shape[2] == 1 and isinstance(mask, Everything):
                mixed, _ = mla_decode(query[:, :, 0], view.keys[:, :, 0], view.table, view.lengths, self.scale, self.kv_rank)
                return mixed[:, :, None]
            view, mask = side_by_side(view, mask, torch.float32)
        entries, (b, h, s, _) = view.keys[:, 0], query.shape
        step = max(1, _SLICE // (b * h * entries.shape[1]))
        starts = range(0, s, step)
        parts = [self._part(query[:, :, at : at + step], entries, sliced(mask, at, at + step, entries)) for at in starts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _part(self, query: Float[Tensor, "b h s w"], entries: Float[Tensor, "b t w"], mask: Mask) -> Float[Tensor, "b h s r"]:
        """The heads below one another: to all of them an entry is the same."""
        b, h, s, w = query.shape
        scores = torch.bmm(query.reshape(b, h * s, w) * self.scale, entries.transpose(1, 2)).view(b, h, s, -1).float()
        weights = (scores + mask.bias if isinstance(mask, Bias) else scores).softmax(-1).to(query.dtype)
        mixed = torch.bmm(weights.view(b, h * s, -1), entries[..., : self.kv_rank]).view(b, h, s, -1)
        return mixed.masked_fill(~mask.alive, 0) if isinstance(mask, Bias) else mixed
