"""The prefix of an action expert: what the decoder knows, read layer by layer and never written."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import ModelError
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.slots import positions_of
from mmsdk.kv.types import KVCache, LayerView
from mmsdk.stages import Context
from mmsdk.vla.heads.visibility import visible

__all__ = ["Prefix", "prefill_blocks", "prefill_sight"]


@dataclass(frozen=True, slots=True)
class Prefix:
    """Each layer's keys and values of a fork, and where the next token of each row stands in it.

    Layers that count alike share one object of places.
    """

    views: tuple[LayerView, ...]
    places: tuple[Int[Tensor, " b"], ...]

    @staticmethod
    def of(cache: KVCache, layers: int, kv_heads: int, head_dim: int) -> "Prefix":
        """Fork the cache and look at it once. Raises ModelError where its layers do not meet the expert's in head space."""
        fork = cache.fork()
        views = tuple(fork.view(layer) for layer in range(layers))
        for layer, view in enumerate(views):
            if (view.keys.shape[1], view.keys.shape[3]) != (kv_heads, head_dim):
                seen = f"{view.keys.shape[1]} key-value heads of {view.keys.shape[3]}"
                raise ModelError(f"layer {layer} of the context has {seen}, the action expert meets {kv_heads} of {head_dim}")
        return Prefix(views, tuple(fork.next(layer) for layer in range(layers)))


@torch.no_grad()
def prefill_blocks(
    decoder: Decoder, embeddings: Float[Tensor, "b s d"], valid: Bool[Tensor, "b s"], starts: Bool[Tensor, " s"], room: int = 0
) -> Context:
    """Run a prefix through the decoder under the block rule; where no token starts a block it is bidirectional, as in pi0.

    The cache keeps space for `room` more tokens a row. `hidden` is the output at the last valid token.
    """
    config, positions = decoder.config, positions_of(valid)
    sizes = config.layers, embeddings.shape[0], config.kv_heads, config.head_dim, embeddings.shape[1] + room
    cache = DenseCache.allocate(*sizes, embeddings.dtype, embeddings.device)
    hidden = decoder(embeddings, positions, cache, visible(valid, starts)[:, None])
    last = positions.argmax(1)
    return Context(hidden[torch.arange(len(last), device=last.device), last], cache)


@torch.no_grad()
def prefill_sight(
    decoder: Decoder,
    sight: Float[Tensor, "i n d"],
    present: Bool[Tensor, "b c"],
    ids: Int[Tensor, "b s"],
    said: Bool[Tensor, "b s"],
    room: int,
) -> Context:
    """[pictures ; words] both ways: n tokens of each of the i = b c pictures, seen where `present`, then the words where `said`."""
    words = decoder.embed(ids)
    embeddings = torch.cat((sight.view(len(present), -1, words.shape[-1]).to(words.dtype), words), dim=1)
    shown = present[:, :, None].expand(-1, -1, sight.shape[1]).flatten(1)
    starts = torch.zeros(embeddings.shape[1], dtype=torch.bool, device=embeddings.device)
    return prefill_blocks(decoder, embeddings, torch.cat((shown, said), dim=1), starts, room)
