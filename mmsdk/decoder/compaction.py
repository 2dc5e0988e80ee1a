"""KV-streams: a full context goes on in its cache, in place of being flushed and read anew from what is to stay.

[published, abstract] the cache streams forward through every compaction, whichever strategy chooses what stays; what the kept entries know
of tokens that are gone is carried on, as the state of a recurrent network is.

[reconstruction] for inference: the entries of tokens that stay are kept as they are, the words of a summary are appended by ordinary
passes, everything else is dropped, and the entries either keep their positions or close up: a key is turned back by as many positions as
were dropped in front of it, so that an endless stream never leaves the context that a model was made for. What comes out is not what
reading the kept tokens anew would give. That is measured, not hidden: `mmsdk bench memory`.

Letters: l layers, b rows, k entries kept of a layer, s new words.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from mmsdk.attention.mla import Latent
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError, ModelError
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.slots import positions_of
from mmsdk.kv.turning import Turning
from mmsdk.kv.types import KVCache

__all__ = ["Positions", "closed_up", "compact"]

Positions = Literal["keep", "close"]


@torch.no_grad()
def compact(
    decoder: Decoder, cache: KVCache, index: Sequence[Int[Tensor, "b _"]], summary: Int[Tensor, "b s"], positions: Positions = "close"
) -> KVCache:
    """The cache with these entries of each layer (ascending indices into its view) and then the words of a summary, which may be none.

    With positions "keep" it is the cache itself, thinned in place; with "close" it is a new one. Raises InputError where the indices are
    not of all layers, ModelError where keys are such that positions cannot be closed up.
    """
    _check(decoder, index)
    if positions == "close":
        cache = closed_up(decoder, cache, index, summary.shape[1])
    else:
        for layer, chosen in enumerate(index):
            cache.keep(layer, chosen)
    if summary.shape[1]:
        places = cache.position[:, None] + torch.arange(summary.shape[1], device=summary.device)
        decoder(decoder.embed(summary), places, cache)
    return cache


def closed_up(decoder: Decoder, cache: KVCache, index: Sequence[Int[Tensor, "b _"]], room: int) -> DenseCache:
    """A cache of these entries alone, at positions 0, 1, 2, ... of every row, with space for `room` more in each layer.

    Padding among them stays padding. The cache it was made from is as it was. Raises ModelError for latents beside which an indexer keeps
    keys of its own, for keys that are turned along several axes, and where frequencies follow how far a row reaches, so that keys of one
    row are turned by several.
    """
    _check(decoder, index)
    views = [cache.view(layer) for layer in range(decoder.config.layers)]
    places = [positions_of(view.valid.gather(1, chosen)) for view, chosen in zip(views, index, strict=True)]
    sizes = decoder.config.layers, len(index[0]), decoder.config.kv_heads, decoder.config.entry
    first = views[0].keys
    fresh = DenseCache.allocate(*sizes, [max(1, at.shape[1] + room) for at in places], first.dtype, first.device)
    for layers in _alike(places):
        if places[layers.start].shape[1]:
            fresh.advance(places[layers.start], layers)
    for layer, (view, chosen, at) in enumerate(zip(views, index, places, strict=True)):
        kept = view.picked(chosen)
        back = (at - kept.positions).masked_fill(~kept.valid, 0)
        fresh.append(layer, _turning(decoder, at, layer).further(kept.keys, back[:, None]), kept.values)
    return fresh


def _turning(decoder: Decoder, places: Int[Tensor, "b k"], layer: int) -> Turning:
    """How keys of a layer are moved."""
    (standing,) = decoder.rotation(places, torch.float32, layer).standing
    attention = decoder.config.attention
    indexed = isinstance(attention, Latent) and attention.indexer.width > 0
    if standing.turning.growing or decoder.config.rope_sections.counts or indexed:
        raise ModelError("keys of this model cannot be moved to other positions; keep positions as they are")
    return standing.turning


def _alike(places: Sequence[Int[Tensor, "b _"]]) -> list[range]:
    """Runs of layers whose entries stand alike, so that they share what is computed from positions."""
    kinds = [0]
    for before, after in pairwise(places):
        kinds.append(kinds[-1] + (not torch.equal(before, after)))
    runs = [list(members) for _, members in groupby(range(len(kinds)), key=kinds.__getitem__)]
    return [range(members[0], members[-1] + 1) for members in runs]


def _check(decoder: Decoder, index: Sequence[Int[Tensor, "b _"]]) -> None:
    if len(index) != decoder.config.layers:
        raise InputError(f"there are {len(index)} of them for {decoder.config.layers} layers", item="index")
