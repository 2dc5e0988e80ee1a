"""An observation through the decoder, behind what is read of earlier ones: both ways inside the block, backwards to the others.

Published (D2-VLA, arXiv 2609.34792): block-wise causal; keys are kept before RoPE; what a block read of others stays in it, so that after
an eviction the memory is not what encoding the remaining blocks anew would give. Any `Decoder` will do: its layers are used as they are,
with biases, norms of queries and keys, scaled rotations and quantised matrices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.attention.mask import Bias
from mmsdk.decoder.rope import Rotation
from mmsdk.decoder.transformer import Decoder, Layer
from mmsdk.kv.received import received
from mmsdk.kv.slots import positions_of
from mmsdk.kv.types import LayerView
from mmsdk.vla.memory.block import Block, Part

__all__ = ["Encoded", "encode"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A new block, the decoder's output at its slots, and what each entry that was there to be seen received of attention, layer by layer.

    Entries are those of the history, side by side, then the block's own; where nobody was to look on there are none.
    """

    block: Block
    hidden: Float[Tensor, "b s d"]
    received: Float[Tensor, "l b t"]


def encode(
    decoder: Decoder,
    embeddings: Float[Tensor, "b s d"],
    valid: Bool[Tensor, "b s"],
    history: Sequence[Part] = (),
    time: float = 0.0,
    observe: bool = False,
) -> Encoded:
    """Encode a block behind `history`; positions count the valid entries of both. Gradients pass to the embeddings and to the history.

    `observe` also computes the attention that entries received, which costs about as much as attending once more.
    """
    everything = torch.cat([*(part.valid for part in history), valid], dim=1)
    positions, slots = positions_of(everything), valid.shape[1]
    rotation = decoder.rotation(positions, embeddings.dtype)
    own = Rotation(rotation.cos[:, :, -slots:], rotation.sin[:, :, -slots:])
    unturned = Rotation(embeddings.new_ones(1, 1, 1, 1), embeddings.new_zeros(1, 1, 1, 1))
    mask = Bias.of((everything[:, None, :] & valid[:, :, None])[:, None], embeddings.dtype)
    lengths, stand = everything.sum(1), _after(valid, everything)
    x, keys, values, seen = embeddings, list[Tensor](), list[Tensor](), list[Tensor]()
    for number, module in enumerate(decoder.layers):
        layer = cast(Layer, module)
        query, key, value = layer.attention.project(layer.norm1(x), unturned)
        entries = rotation(torch.cat([*(part.keys(number) for part in history), key], dim=2))
        view = LayerView(entries, torch.cat([*(part.values(number) for part in history), value], dim=2), positions, everything, lengths)
        turned = own(query)
        attended = layer.attention.core(turned, view, mask)
        x = x + layer.attention.o(attended.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.norm2(x))
        keys.append(key)
        values.append(value)
        if observe:
            seen.append(received(turned, stand, view))
    nobody = embeddings.new_zeros(0, *everything.shape, dtype=torch.float32)
    block = Block(torch.stack(keys), torch.stack(values), valid, time)
    return Encoded(block, decoder.norm(x), torch.stack(seen) if observe else nobody)


def _after(valid: Bool[Tensor, "b s"], everything: Bool[Tensor, "b t"]) -> Int[Tensor, "b s"]:
    """Positions behind everything, from which a query sees all there is; -1 for padding."""
    return torch.where(valid, everything.shape[1], -1)
