"""An observation through the decoder, behind what is read of earlier ones: both ways inside the block, backwards to the others.

Published (D2-VLA, arXiv 2609.34792): block-wise causal; keys are kept before RoPE; what a block read of others stays in it, so that after
an eviction the memory is not what encoding the remaining blocks anew would give. It is an ordinary pass of a `Decoder` over an
`mmsdk.kv.unturned.UnturnedCache`: its layers are used as they are, with biases, norms of queries and keys, scaled rotations and quantised
matrices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.decoder.transformer import Decoder
from mmsdk.kv.parts import Block, Part
from mmsdk.kv.read import ReadCache
from mmsdk.kv.received import received
from mmsdk.kv.slots import positions_of
from mmsdk.kv.types import LayerView
from mmsdk.kv.unturned import UnturnedCache, unseen

__all__ = ["Encoded", "encode", "encode_blocks", "reading"]

_EVERYBODY = torch.ones(1, 1, dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A new block, the decoder's output at its slots, and what each entry that was there to be seen received of attention, layer by layer.

    Entries are those of the history, side by side, then the block's own; where nobody was to look on there are none. `cache` holds all.
    """

    block: Block
    hidden: Float[Tensor, "b s d"]
    received: Float[Tensor, "l b t"]
    cache: UnturnedCache

    @property
    def read(self) -> ReadCache:
        """All of them, for a reader that takes the whole of what the block was encoded behind."""
        return ReadCache.at(self.cache, len(self.block.keys))


def encode(
    decoder: Decoder,
    embeddings: Float[Tensor, "b s d"],
    valid: Bool[Tensor, "b s"],
    history: Sequence[Part] = (),
    time: float = 0.0,
    observe: bool = False,
    whose: Bool[Tensor, "#b #s"] = _EVERYBODY,
) -> Encoded:
    """Encode a block behind `history`; positions count the valid entries of both. Gradients pass to the embeddings and to the history.

    `observe` also computes the attention that entries received, of `whose` queries, which costs about as much as attending once more.
    """
    everything = torch.cat([*(part.valid for part in history), valid], dim=1)
    stand, seen = _after(valid & whose.to(valid.device), everything), list[Tensor]()

    def noting(layer: int, query: Tensor, view: LayerView) -> None:
        seen.append(received(query, stand, view))

    ways = decoder.rotation, decoder.config.local.layers, noting if observe else unseen
    nothing = decoder.config.layers, len(valid), valid.device
    cache = UnturnedCache.behind(history, *ways) if history else UnturnedCache.empty(*nothing, *ways)
    positions, slots = positions_of(everything), valid.shape[1]
    hidden = decoder(embeddings, positions[:, -slots:], cache, (everything[:, None, :] & valid[:, :, None])[:, None])
    nobody = embeddings.new_zeros(0, *everything.shape, dtype=torch.float32)
    return Encoded(cache.block(slots, time), hidden, torch.stack(seen) if observe else nobody, cache)


def encode_blocks(decoder: Decoder, embeddings: Float[Tensor, "b k s d"], valid: Bool[Tensor, "b k s"], behind: int) -> UnturnedCache:
    """Several blocks in a single pass, each behind the `behind` ones before it: what `encode` leaves of one after the other.

    For training, which knows all of an episode. Gradients pass to the embeddings.
    """
    blocks, slots = valid.shape[1:]
    number = torch.arange(blocks, device=valid.device).repeat_interleave(slots)
    ages, real = number[:, None] - number, valid.flatten(1)
    seen = real[:, None, :] & real[:, :, None] & (ages >= 0) & (ages <= behind)
    cache = UnturnedCache.empty(decoder.config.layers, len(valid), valid.device, decoder.rotation, decoder.config.local.layers)
    # of the last layer only keys and values are wanted
    decoder(embeddings.flatten(1, 2), positions_of(real), cache, seen[:, None], last=1)
    return cache


def reading(decoder: Decoder, parts: Sequence[Part]) -> ReadCache:
    """What a reader that stores nothing sees of these parts. Gradients pass through it to the blocks."""
    return ReadCache.of(parts, decoder.rotation, decoder.config.local.layers)


def _after(valid: Bool[Tensor, "b s"], everything: Bool[Tensor, "b t"]) -> Int[Tensor, "b s"]:
    """Positions behind everything, from which a query sees all there is; -1 for padding."""
    return torch.where(valid, everything.shape[1], -1)
