"""The prompts of a batch through the decoder, into a cache that is as large as each layer needs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.decoder.spans import Span
from mmsdk.decoder.thinning import Cut, Thinned, thin
from mmsdk.decoder.transformer import Decoder
from mmsdk.kv.dense import DenseCache

__all__ = ["Laid", "prefilled"]


@dataclass(frozen=True, slots=True)
class Laid:
    """A prompt in front of the decoder: its embeddings, their positions, and what stands where, with the counts after each cut.

    `deep` is added to the stream after the first, the second, ... layer.
    """

    embeddings: Float[Tensor, "s d"]
    positions: Int[Tensor, " s"]
    spans: tuple[Span, ...]
    deep: tuple[Float[Tensor, "s d"], ...] = ()


def prefilled(decoder: Decoder, rows: Sequence[Laid], cuts: Sequence[Cut], room: int) -> tuple[Thinned, DenseCache]:
    """Run prompts through the decoder in one pass, into a cache with space for `room` more tokens a row.

    Shorter prompts are padded in front, where positions of -1 keep the padding out of sight of everything.
    """
    config, first = decoder.config, rows[0].embeddings
    widths = [max(sum(span.counts[stage] for span in row.spans) for row in rows) for stage in range(len(cuts) + 1)]
    embeddings = first.new_zeros(len(rows), widths[0], config.width)
    deep = [torch.zeros_like(embeddings) for _ in range(max(len(row.deep) for row in rows))]
    positions = torch.full((len(rows), widths[0]), -1, dtype=torch.int64, device=first.device)
    for place, row in enumerate(rows):
        embeddings[place, widths[0] - len(row.embeddings) :] = row.embeddings
        positions[place, widths[0] - len(row.embeddings) :] = row.positions
        for added, own in zip(deep, row.deep, strict=False):
            added[place, widths[0] - len(own) :] = own
    capacities = [widths[sum(cut.layer <= layer for cut in cuts)] + room for layer in range(config.layers)]
    cache = DenseCache.allocate(config.layers, len(rows), config.kv_heads, config.head_dim, capacities, first.dtype, first.device)
    return thin(decoder, embeddings, positions, cache, [row.spans for row in rows], cuts, deep=deep), cache
