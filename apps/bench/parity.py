"""Parity with transformers in float32: our language model on its real weights, every family on tiny ones of its own class.

The logits and the greedy tokens of both. `kv_bytes` is what a token takes of the cache, `kv_bytes_heads` what it would take if every query
head had a key and a value of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoModelForCausalLM

from mmsdk.apps.checkpoints.seeing import MOVED, WRITERS, compared, prompts
from mmsdk.apps.checkpoints.text import VOCABULARY, Kind, TextReplica
from mmsdk.apps.console import Cell, counted
from mmsdk.apps.paths import PATHS, ids_of, text_model
from mmsdk.attention.mla import Latent
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import ModelError
from mmsdk.families import open_model
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.loop import collect, generate
from mmsdk.kv.memory import DenseMemory, Shape
from mmsdk.kv.types import KVCache
from mmsdk.models.text import read_decoder
from mmsdk.models.types import VLM
from mmsdk.weights.bundle import pull

__all__ = ["Parity"]

PROMPTS = (
    "The capital of France is",
    "Question: What is in the picture?\nAnswer:",
    "Once upon a time there was a small robot that",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "A list of five fruits:\n1.",
    "Das Wetter ist heute",
    "2 + 2 = 4, 3 + 3 =",
    "Dear Sir or Madam,\n\nI am writing to",
    "The red cube is left of the",
)


_REAL = "SmolLM2-135M-Instruct float32"
# Tokens of a tiny model's prompt, and of its answer.
_READ, _SAID = 40, 32


@dataclass(frozen=True, slots=True)
class Parity:
    """Compares on `prompts` prompts (at most 10), `tokens` greedy tokens each of the real model and at most 32 of tiny ones."""

    prompts: int = 10
    tokens: int = 128

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {model, max_abs_logit_diff, greedy_match, tokens, kv_bytes, kv_bytes_heads}, of tiny models by their `model_type`.

        greedy_match is the share of prompts with identical tokens. The real model is asked again by every way that must not change an
        answer; what is compared there is what it says, not its logits.
        """
        path, texts = pull("mini")["language"], PROMPTS[: self.prompts]
        vlm = text_model(path, torch.float32)
        said, logits = _theirs(path, [ids_of(vlm, text) for text in texts], self.tokens)
        works: list[Callable[[], dict[str, Cell]]] = [
            partial(self._real, vlm, said, logits),
            *(partial(self._way, vlm, name, said) for name in PATHS),
            *(partial(self._tiny, kind) for kind in get_args(Kind)),
            *(partial(self._seeing, kind) for kind in WRITERS),
        ]
        return [work() for work in counted("comparing", works)]

    def _real(self, vlm: VLM, said: Sequence[list[int]], logits: Sequence[Float[Tensor, "s v"]]) -> dict[str, Cell]:
        """Both read the same text, so that one early difference would not make all that follows incomparable."""
        apart, same = [], []
        for text, theirs, reference in zip(PROMPTS, said, logits, strict=False):
            ours = _logits(vlm.decoder, torch.tensor([ids_of(vlm, text) + theirs]))
            apart.append((ours - reference).abs().max().item())
            # whose likeliest token is theirs at every step says what they say
            same.append(ours[-len(theirs) - 1 : -1].argmax(dim=-1).tolist() == theirs)
        return _row(_REAL, vlm.decoder, apart, same, len(same) * self.tokens)

    def _way(self, vlm: VLM, name: str, said: Sequence[list[int]]) -> dict[str, Cell]:
        # an answer begins and ends without white space
        wanted, texts = [vlm.tokenizer.decode(ids).strip() for ids in said], PROMPTS[: self.prompts]
        same = [mine.strip() == other for mine, other in zip(PATHS[name](vlm, texts, self.tokens), wanted, strict=True)]
        return _row(f"{_REAL}, {name}", vlm.decoder, [], same, len(same) * self.tokens)

    def _tiny(self, kind: Kind) -> dict[str, Cell]:
        tokens, generator = min(self.tokens, _SAID), torch.Generator().manual_seed(0)
        prompts = [torch.randint(0, VOCABULARY, (1, _READ), generator=generator) for _ in range(self.prompts)]
        apart, same = [], []
        with TemporaryDirectory() as folder:
            replica = TextReplica.write(kind, Path(folder))
            decoder = read_decoder(Path(folder), torch.float32)
            for prompt in prompts:
                theirs = replica.says(prompt, tokens)
                whole = torch.cat((prompt, torch.tensor([theirs])), dim=1)
                apart.append((_logits(decoder, whole) - replica.logits(whole)).abs().max().item())
                same.append(_say(decoder, prompt, tokens, str) == theirs)
        return _row(kind, decoder, apart, same, len(same) * tokens)

    def _seeing(self, kind: str) -> dict[str, Cell]:
        tokens = min(self.tokens, _SAID)
        with TemporaryDirectory() as folder:
            replica = WRITERS[kind](Path(folder))
            vlm = open_model(folder, torch.float32, torch.device("cpu"))
            found = [compared(replica, vlm, prompt, tokens) for prompt in prompts(self.prompts, clips=kind in MOVED)]
        apart, same = [one.apart for one in found], [one.same for one in found]
        return _row(kind, vlm.decoder, apart, same, len(same) * tokens)


def _row(model: str, decoder: Decoder, apart: Sequence[float], same: Sequence[bool], tokens: int) -> dict[str, Cell]:
    held, heads = _cached(decoder.config)
    return {
        "model": model,
        "max_abs_logit_diff": max(apart, default=None),
        "greedy_match": sum(same) / len(same),
        "tokens": tokens,
        "kv_bytes": held,
        "kv_bytes_heads": heads,
    }


def _cached(config: DecoderConfig) -> tuple[int | float, int]:
    """Bytes of a token in float32: of what is cached, and of a key and a value for every query head.

    Of levels it is what a token adds to compressed entries; windows do not grow.
    """
    value = config.attention.value if isinstance(config.attention, Latent) else config.head_dim
    number = torch.float32.itemsize * config.layers
    heads = number * config.heads * (config.head_dim + value)
    for plan in config.levels:
        return sum(torch.float32.itemsize * one.width / one.rate for layer in plan.series for one in layer), heads
    return number * config.kv_heads * sum(config.entry), heads


def _say(decoder: Decoder, prompt: Int[Tensor, "1 s"], tokens: int, decode: Callable[[Sequence[int]], str]) -> list[int]:
    hidden, cache = _read(decoder, prompt, tokens)
    (row,) = collect(generate(decoder, hidden[:, -1], cache, [GenerationConfig(max_tokens=tokens)], decode, frozenset()), 1)
    if isinstance(row.finish, ModelError):
        raise row.finish
    return list(row.ids)


def _theirs(path: Path, prompts: Sequence[list[int]], tokens: int) -> tuple[list[list[int]], list[Float[Tensor, "s v"]]]:
    """What transformers says greedily, and its logits over the prompt and that answer."""
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    # neither side stops at the end of text, so that every prompt is compared over as many tokens
    model.generation_config.eos_token_id = None
    said, logits = [], []
    with torch.no_grad():
        for prompt in counted("asking transformers", prompts):
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            whole = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
            said.append(whole[0, len(prompt) :].tolist())
            logits.append(model(whole).logits[0])
    return said, logits


@torch.no_grad()
def _read(decoder: Decoder, ids: Int[Tensor, "1 s"], room: int) -> tuple[Float[Tensor, "1 s d"], KVCache]:
    length = ids.shape[1]
    config = decoder.config
    shape = Shape(config.layers, config.kv_heads, config.entry, torch.float32, torch.device("cpu"), config.levels)
    cache, _ = DenseMemory().begin(shape, [length + room] * config.layers, [()])
    return decoder(decoder.embed(ids), torch.arange(length)[None], cache), cache


@torch.no_grad()
def _logits(decoder: Decoder, ids: Int[Tensor, "1 s"]) -> Float[Tensor, "s v"]:
    scores: Tensor = decoder.logits(_read(decoder, ids, 0)[0])[0]
    return scores
