"""KV caches: bytes a token, perplexity, speed of decoding and blocks in use of every kind of cache, on mini's language model."""

import math
import pydoc_data.topics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mmsdk.apps.console import Cell
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.memory import KINDS, Shape, memory_of
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.types import KVCache
from mmsdk.precision import resolve_dtype
from mmsdk.weights.bundle import pull
from mmsdk.weights.quantised import gguf_decoder

__all__ = ["Kv"]

# Scores of so many tokens at one time: a vocabulary of them each.
_SCORED = 128


@dataclass(frozen=True, slots=True)
class Kv:
    """Over `pieces` pieces of `prompt` tokens of the language reference that comes with Python, read `chunk` tokens at a time.

    A chunk sees what came before it as the cache keeps it, so that perplexity tells what fewer bits cost. `tokens` more are decoded for the
    speed.
    """

    prompt: int = 1024
    pieces: int = 4
    chunk: int = 64
    tokens: int = 32
    dtype: str = "auto"

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {kind, bits, bytes_per_token, perplexity, decode_tok_s, utilisation}; `bits` are those of a number, scales included."""
        for name in ("prompt", "pieces", "chunk", "tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"it is {getattr(self, name)}, it must be at least 1", item=name)
        dtype = resolve_dtype(self.dtype, torch.device("cpu"))
        decoder, tokenizer = gguf_decoder(pull("mini")["language"], dtype, "none")
        ids = torch.tensor(tokenizer.encode("\n\n".join(pydoc_data.topics.topics.values()))[: self.prompt * self.pieces])
        with torch.no_grad():
            return [self._row(kind, decoder, ids.split(self.prompt)) for kind in KINDS]

    def _row(self, kind: str, decoder: Decoder, pieces: Sequence[Tensor]) -> dict[str, Cell]:
        config, dtype = decoder.config, decoder.norm.weight.dtype
        shape = Shape(config.layers, config.kv_heads, config.head_dim, dtype, torch.device("cpu"))
        lost, seconds, held, used = 0.0, 0.0, 0, list[float]()
        for ids in pieces:
            cache, _ = memory_of(kind).begin(shape, [len(ids) + self.tokens] * config.layers, [[]])
            lost += self._read(decoder, cache, ids)
            seconds += self._decode(decoder, cache, ids[-1:])
            held += _bytes(cache)
            used.append(cache.utilisation if isinstance(cache, PagedCache) else 1.0)
        tokens = sum(len(ids) + self.tokens for ids in pieces)
        numbers = 2 * config.layers * config.kv_heads * config.head_dim
        return {
            "kind": kind,
            "bits": 8 * held / tokens / numbers,
            "bytes_per_token": held / tokens,
            "perplexity": math.exp(lost / sum(len(ids) - 1 for ids in pieces)),
            "decode_tok_s": self.tokens * len(pieces) / seconds,
            "utilisation": sum(used) / len(used),
        }

    def _read(self, decoder: Decoder, cache: KVCache, ids: Tensor) -> float:
        """The sum of -log p of all tokens but the first."""
        hidden = torch.cat([_pass(decoder, cache, part) for part in ids.split(self.chunk)])
        parts = zip(hidden[:-1].split(_SCORED), ids[1:].split(_SCORED), strict=True)
        return sum(float(F.cross_entropy(decoder.logits(part), wanted, reduction="sum")) for part, wanted in parts)

    def _decode(self, decoder: Decoder, cache: KVCache, last: Tensor) -> float:
        """Seconds of the likeliest tokens, one after another."""
        started = time.perf_counter()
        for _ in range(self.tokens):
            last = decoder.logits(_pass(decoder, cache, last)).argmax(-1)
        return time.perf_counter() - started


def _pass(decoder: Decoder, cache: KVCache, ids: Tensor) -> Tensor:
    positions = cache.position[:, None] + torch.arange(len(ids))
    hidden: Tensor = decoder(decoder.embed(ids[None]), positions, cache)
    return hidden[0]


def _bytes(cache: KVCache) -> int:
    assert isinstance(cache, DenseCache | PagedCache), "every memory gives one of these"
    return cache.nbytes
