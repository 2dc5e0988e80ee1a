"""A long text through a small window, over and over compacted: by carrying the cache on, and by reading what stays anew (KV-streams).

Both hold the same tokens after every compaction: the first few and the last half of the window.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mmsdk.decoder.compaction import closed_up
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError
from mmsdk.kv.dense import DenseCache

__all__ = ["Carried", "carried"]

_SINKS = 4
_CHUNK = 128


@dataclass(frozen=True, slots=True)
class Carried:
    """Of one way to go on: the geometric mean of the probability of every token but the first, seconds, bytes, and compactions."""

    quality: float
    seconds: float
    held: int
    compactions: int


@torch.no_grad()
def carried(decoder: Decoder, ids: Sequence[int], window: int, anew: bool) -> Carried:
    """Read a text through a window of so many tokens; `anew` says that what stays is read again at each compaction.

    Raises InputError for a window that has no room for two chunks and the sinks.
    """
    if window < 2 * _CHUNK + _SINKS:
        raise InputError(f"it is {window}, it must be at least {2 * _CHUNK + _SINKS}", item="window")
    text, cache, inside = torch.tensor([list(ids)]), _empty(decoder, window), list[int]()
    lost, last, compactions, started = 0.0, list[Tensor](), 0, time.perf_counter()
    for start in range(0, len(ids), _CHUNK):
        chunk = text[:, start : start + _CHUNK]
        if len(inside) + chunk.shape[1] > window:
            stay = [*range(_SINKS), *range(len(inside) - window // 2 + _SINKS, len(inside))]
            inside, compactions = [inside[place] for place in stay], compactions + 1
            cache = _read_anew(decoder, text, inside, window) if anew else _carried_on(decoder, cache, stay, window)
        hidden = _pass(decoder, cache, chunk)
        lost += _lost(decoder, torch.cat((*last, hidden[:-1])), chunk[0, 0 if last else 1 :])
        last, inside = [hidden[-1:]], [*inside, *range(start, start + chunk.shape[1])]
    return Carried(math.exp(-lost / (len(ids) - 1)), time.perf_counter() - started, cache.nbytes, compactions)


def _carried_on(decoder: Decoder, cache: DenseCache, stay: Sequence[int], window: int) -> DenseCache:
    index = torch.tensor([list(stay)])
    return closed_up(decoder, cache, [index] * decoder.config.layers, window - len(stay))


def _read_anew(decoder: Decoder, text: Tensor, inside: Sequence[int], window: int) -> DenseCache:
    cache = _empty(decoder, window)
    _pass(decoder, cache, text[:, list(inside)])
    return cache


def _empty(decoder: Decoder, window: int) -> DenseCache:
    config, like = decoder.config, decoder.norm.weight
    return DenseCache.allocate(config.layers, 1, config.kv_heads, config.entry, window, like.dtype, like.device)


def _pass(decoder: Decoder, cache: DenseCache, ids: Tensor) -> Float[Tensor, "s d"]:
    positions = cache.position[:, None] + torch.arange(ids.shape[1])
    hidden: Tensor = decoder(decoder.embed(ids), positions, cache)
    return hidden[0]


def _lost(decoder: Decoder, hidden: Float[Tensor, "s d"], wanted: Tensor) -> float:
    return float(F.cross_entropy(decoder.logits(hidden), wanted, reduction="sum"))
