"""KV caches: bytes a token, perplexity, mini's answers, speed of decoding and blocks in use of every kind of cache."""

import math
import pydoc_data.topics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mmsdk.apps.compression.asked import Asked, drawn
from mmsdk.apps.console import Cell, counted
from mmsdk.apps.train_mini.scenes import Artist
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.memory import KINDS, memory_of
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.shape import Shape
from mmsdk.kv.types import KVCache
from mmsdk.models.mini.family import Mini, load
from mmsdk.pipeline import Pipeline
from mmsdk.precision import resolve_dtype
from mmsdk.recall import recalling
from mmsdk.weights.bundle import pull
from mmsdk.weights.quantised import gguf_decoder

__all__ = ["Kv"]

# Scores of so many tokens at one time: a vocabulary of them each.
_SCORED = 128
# Nobody looked at what this draws while mini's recipe was made; tokens that no right answer is longer than.
_SEED, _LONGEST = 2_000_029, 32


@dataclass(frozen=True, slots=True)
class Kv:
    """Over `pieces` pieces of `prompt` tokens of the language reference that comes with Python, read `chunk` tokens at a time.

    A chunk sees what came before it as the cache keeps it, so that perplexity tells what fewer bits cost. `tokens` more are decoded for the
    speed. `questions` are asked of mini, each about a clip of its own that no training has seen.
    """

    prompt: int = 1024
    pieces: int = 4
    chunk: int = 64
    tokens: int = 32
    questions: int = 64
    dtype: str = "auto"

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {kind, bits, bytes_per_token, perplexity, answers, decode_tok_s, utilisation}.

        `bits` are those of a number, scales included; `answers` is the share of the questions that are answered in the very words.
        """
        for name in ("prompt", "pieces", "chunk", "tokens", "questions"):
            if getattr(self, name) < 1:
                raise InputError(f"it is {getattr(self, name)}, it must be at least 1", item=name)
        dtype = resolve_dtype(self.dtype, torch.device("cpu"))
        decoder, tokenizer = gguf_decoder(pull("mini")["language"], dtype, "none")
        ids = torch.tensor(tokenizer.encode("\n\n".join(pydoc_data.topics.topics.values()))[: self.prompt * self.pieces])
        with torch.no_grad():
            rows = [self._row(kind, decoder, ids.split(self.prompt)) for kind in counted("reading", KINDS)]
        mini = load("mini", None, dtype, torch.device("cpu"))
        asked = drawn(mini, Artist(pull("emoji")["images"], pull("photos")["images"], held_out=True), "clip", self.questions, 1, _SEED)
        return [row | {"answers": _answers(mini, kind, asked)} for row, kind in zip(rows, counted("asking", KINDS), strict=True)]

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


def _answers(mini: Mini, kind: str, asked: Sequence[Asked]) -> float:
    pipe = Pipeline(mini, recall=recalling(kind))
    said = pipe([(one.encoded, qa.question) for one in asked for qa in one.questions], max_tokens=_LONGEST)
    wanted = [qa.answer for one in asked for qa in one.questions]
    return sum(str(answer).strip() == right for answer, right in zip(said, wanted, strict=True)) / len(wanted)


def _pass(decoder: Decoder, cache: KVCache, ids: Tensor) -> Tensor:
    positions = cache.position[:, None] + torch.arange(len(ids))
    hidden: Tensor = decoder(decoder.embed(ids[None]), positions, cache)
    return hidden[0]


def _bytes(cache: KVCache) -> int:
    assert isinstance(cache, DenseCache | PagedCache), "every memory gives one of these"
    return cache.nbytes
