"""Multi-head latent attention with its weights (DeepSeek-V2, arXiv 2405.04434), and the indexer of DeepSeek-V3.2 (arXiv 2512.02556).

What is attended to, and in which of two equal ways, is `mmsdk.attention.mla`; which entries a query reads is `mmsdk.attention.dsa`. In
the cache, a token's key is its entry [c ; r], of one head; its value is its key for the indexer, and has no width where there is none.

Matrices are named by the paper's letters: q_down is W_DQ, q_up W_UQ and W_QR, kv_down W_DKV and W_KR, kv_up W_UK and W_UV.
Letters: r rank of the latents, w width of an entry, n channels of a head without rotation.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.attention.dsa import Lightning, narrowed
from mmsdk.attention.mask import Mask, Masks, side_by_side
from mmsdk.attention.mla import Latent
from mmsdk.attention.types import Attention
from mmsdk.decoder.asking import Asking
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.linear import Linear
from mmsdk.decoder.norm import RMSNorm
from mmsdk.decoder.rope import Rotation
from mmsdk.kv.policy_cache import PolicyCache
from mmsdk.kv.types import KVCache, LayerView, PagedView, View

__all__ = ["Indexer", "LatentAttention", "SeeAll"]

# The published code has it for the norms of latents, whatever the config says of the others.
_EPS = 1e-6


class LatentAttention(nn.Module):
    """Implements `mmsdk.decoder.transformer.LayerAttention`. `core` attends to the expanded keys and values of a prompt."""

    def __init__(self, config: DecoderConfig, sizes: Latent, core: Attention) -> None:
        super().__init__()
        self.sizes, self.heads, self.core = sizes, config.heads, core
        low = sizes.q_rank or config.width
        self.q_down: nn.Module = Linear(config.width, low, bias=config.qkv_bias) if sizes.q_rank else nn.Identity()
        self.q_norm: nn.Module = RMSNorm(low, _EPS) if sizes.q_rank else nn.Identity()
        self.q_up = Linear(low, config.heads * sizes.head, bias=False)
        self.kv_down = Linear(config.width, sizes.width, bias=config.qkv_bias)
        self.kv_norm = RMSNorm(sizes.kv_rank, _EPS)
        self.kv_up = Linear(sizes.kv_rank, config.heads * (sizes.nope + sizes.value), bias=False)
        self.o = Linear(config.heads * sizes.value, config.width, bias=config.o_bias)
        lightning = sizes.indexer
        self.indexer = Indexer(config.width, low, sizes.rope, lightning) if isinstance(lightning, Lightning) else SeeAll()

    def forward(self, x: Float[Tensor, "b s d"], rotation: Rotation, cache: KVCache, layer: int, masks: Masks) -> Float[Tensor, "b s d"]:
        """Attend from the new tokens to all that the cache then holds, or to what the indexer chooses of it."""
        low: Tensor = self.q_norm(self.q_down(x))
        look = Looking(self, x, low, self._query(low, rotation), rotation)
        new = self._entry(x, rotation), self.indexer.keys(x, rotation)
        if isinstance(cache, PolicyCache):
            seen = cache.attend(layer, self._scored(look.query), *new, Asking(look, masks, rotation))
        else:
            view = cache.append(layer, *new)
            seen = look(look.query, view, masks.of(view))
        out: Tensor = self.o(seen.transpose(1, 2).flatten(2))
        return out

    def looked(self, look: "Looking", view: View, mask: Mask) -> Float[Tensor, "b h s v"]:
        """What the new tokens get from a view, or from what the indexer chooses of it."""
        view, mask = self.indexer(look.x, look.low, look.rotation, view, mask)
        absorbed = self.sizes.absorbs(look.x.shape[1])
        seen: Tensor = self._absorbed(look.query, view, mask) if absorbed else self._expanded(look.query, view, mask)
        return seen

    def project(
        self, x: Float[Tensor, "b s d"], rotation: Rotation
    ) -> tuple[Float[Tensor, "b h s w"], Float[Tensor, "b 1 s w"], Float[Tensor, "b 1 s e"]]:
        """See `LayerAttention`. The queries are absorbed; the indexer's choice is no part of the weights that they give."""
        query = self._scored(self._query(self.q_norm(self.q_down(x)), rotation))
        return query, self._entry(x, rotation), self.indexer.keys(x, rotation)

    def _scored(self, query: Float[Tensor, "b h s e"]) -> Float[Tensor, "b h s w"]:
        """Absorbed, and such that the products with entries, divided by the root of their width, are the scores."""
        scored: Tensor = self._into_latents(query) * (self.sizes.scale * self.sizes.width**0.5)
        return scored

    def _query(self, low: Float[Tensor, "b s q"], rotation: Rotation) -> Float[Tensor, "b h s e"]:
        heads = self.q_up(low).unflatten(2, (self.heads, -1)).transpose(1, 2)
        nope, turned = heads.split((self.sizes.nope, self.sizes.rope), dim=-1)
        return torch.cat((nope, rotation(self._halved(turned))), dim=-1)

    def _entry(self, x: Float[Tensor, "b s d"], rotation: Rotation) -> Float[Tensor, "b 1 s w"]:
        latent, turned = self.kv_down(x)[:, None].split((self.sizes.kv_rank, self.sizes.rope), dim=-1)
        return torch.cat((self.kv_norm(latent), rotation(self._halved(turned))), dim=-1)

    def _halved(self, x: Float[Tensor, "b h s e"]) -> Float[Tensor, "b h s e"]:
        """Channels paired side by side (2 i, 2 i + 1) to pairs (i, i + e / 2), for queries and keys alike, so that products stay."""
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.sizes.interleaved else x

    def _absorbed(self, query: Float[Tensor, "b h s e"], view: View, mask: Mask) -> Float[Tensor, "b h s v"]:
        mixed = self.sizes(self._into_latents(query), view, mask)
        return torch.einsum("bhsr,hvr->bhsv", mixed, self._up()[1])

    def _into_latents(self, query: Float[Tensor, "b h s e"]) -> Float[Tensor, "b h s w"]:
        nope, turned = query.split((self.sizes.nope, self.sizes.rope), dim=-1)
        return torch.cat((torch.einsum("bhsn,hnr->bhsr", nope, self._up()[0]), turned), dim=-1)

    def _expanded(self, query: Float[Tensor, "b h s e"], view: View, mask: Mask) -> Float[Tensor, "b h s v"]:
        """Keys and values of every head, the values as wide as the keys: fused kernels want them alike."""
        view, mask = side_by_side(view, mask, query.dtype) if isinstance(view, PagedView) else (view, mask)
        latent, turned = view.keys.split((self.sizes.kv_rank, self.sizes.rope), dim=-1)
        made = self.kv_up(latent[:, 0]).unflatten(2, (self.heads, -1)).transpose(1, 2)
        nope, value = made.split((self.sizes.nope, self.sizes.value), dim=-1)
        key = torch.cat((nope, turned.expand(-1, self.heads, -1, -1)), dim=-1)
        wide = LayerView(key, F.pad(value, (0, self.sizes.head - self.sizes.value)), view.positions, view.valid, view.lengths, view.ordered)
        sharp = query if self.sizes.sharpness == 1 else query * self.sizes.sharpness
        return self.core(sharp, wide, mask)[..., : self.sizes.value]

    def _up(self) -> tuple[Float[Tensor, "h n r"], Float[Tensor, "h v r"]]:
        """W_UK and W_UV of each head, as views."""
        keys, values = self.kv_up.weight.unflatten(0, (self.heads, -1)).split((self.sizes.nope, self.sizes.value), dim=1)
        return keys, values


@dataclass(frozen=True, slots=True)
class Looking:
    """New tokens that look at latents, as an `mmsdk.attention.types.Attention`; see `mmsdk.decoder.asking.Bound`."""

    attention: LatentAttention
    x: Float[Tensor, "b s d"]
    low: Float[Tensor, "b s q"]
    query: Float[Tensor, "b h s e"]
    rotation: Rotation

    def __call__(self, query: Float[Tensor, "b h s _"], view: View, mask: Mask) -> Float[Tensor, "b h s v"]:
        """What each head gets; by its own queries, whatever form these are given in."""
        return self.attention.looked(self, view, mask)

    def row(self, place: int) -> "Looking":
        """Those of one row."""
        here = slice(place, place + 1)
        return Looking(self.attention, self.x[here], self.low[here], self.query[here], self.rotation.row(place))


class SeeAll(nn.Module):
    """Every query may read every entry: no indexer, and nothing of one in the cache."""

    def keys(self, x: Float[Tensor, "b s d"], rotation: Rotation) -> Float[Tensor, "b 1 s e"]:
        """Of no width."""
        return x.new_empty(x.shape[0], 1, x.shape[1], 0)

    def forward(
        self, x: Float[Tensor, "b s d"], low: Float[Tensor, "b s q"], rotation: Rotation, view: View, mask: Mask
    ) -> tuple[View, Mask]:
        """As they are."""
        return view, mask


class Indexer(nn.Module):
    """The lightning indexer: scores every entry for every query, and leaves each the best. It turns in halves, never in pairs."""

    def __init__(self, width: int, low: int, rope: int, sizes: Lightning) -> None:
        super().__init__()
        self.sizes, self.rope = sizes, rope
        self.q_up = Linear(low, sizes.heads * sizes.width, bias=False)
        self.k = Linear(width, sizes.width, bias=False)
        self.k_norm = nn.LayerNorm(sizes.width, eps=_EPS)
        self.weights = Linear(width, sizes.heads, bias=False)

    def keys(self, x: Float[Tensor, "b s d"], rotation: Rotation) -> Float[Tensor, "b 1 s e"]:
        """What the cache keeps of the new tokens for later queries to score."""
        return self._turned(self.k_norm(self.k(x))[:, None], rotation)

    @torch.no_grad()
    def forward(
        self, x: Float[Tensor, "b s d"], low: Float[Tensor, "b s q"], rotation: Rotation, view: View, mask: Mask
    ) -> tuple[View, Mask]:
        """What each query sees: the view and the mask as they are while there are few entries, else narrowed."""
        if view.positions.shape[1] <= self.sizes.topk:
            return view, mask
        heads = self.q_up(low).unflatten(2, (self.sizes.heads, -1)).transpose(1, 2)
        weights = F.linear(x.float(), self.weights.weight.float()) * (self.sizes.heads * self.sizes.width) ** -0.5
        return narrowed(self._turned(heads, rotation).transpose(1, 2), weights, view, mask, self.sizes.topk)

    def _turned(self, x: Float[Tensor, "b h s e"], rotation: Rotation) -> Float[Tensor, "b h s e"]:
        return torch.cat((rotation(x[..., : self.rope]), x[..., self.rope :]), dim=-1)
