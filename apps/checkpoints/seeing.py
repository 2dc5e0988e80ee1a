"""A family with sight beside its replica: what both make of prompts about pictures and clips of noise."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.apps.checkpoints.qwen_vl import KINDS as QWEN_KINDS
from mmsdk.apps.checkpoints.qwen_vl import QwenReplica
from mmsdk.apps.checkpoints.sight import KINDS as SIGHT_KINDS
from mmsdk.apps.checkpoints.sight import MOVING, SightReplica
from mmsdk.compress import Compression
from mmsdk.decoder.prefill import Laid, prefilled
from mmsdk.errors import ModelError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.loop import collect, generate
from mmsdk.models.types import VLM
from mmsdk.prompt import Prompt, Text
from mmsdk.stages import Clock, Row, lay_out
from mmsdk.vision.types import Image, Media, Video

__all__ = ["MOVED", "WRITERS", "Compared", "Replica", "clip", "compared", "picture", "prompts", "rows_of", "says", "scores"]

_SIZES = ((32, 48), (24, 24), (40, 16), (61, 90), (16, 101))
_QUESTIONS: Sequence[str] = ("What is two and two?", "What is this?", "Which is the widest?", "What happens?")


@runtime_checkable
class Replica(Protocol):
    """A model of transformers; prompts are media, then words."""

    def logits(self, prompt: Prompt) -> Float[Tensor, "s v"]:
        """Scores at every token."""
        ...

    def says(self, prompt: Prompt, tokens: int) -> list[int]:
        """Greedy tokens, not stopping at the end of text."""
        ...


WRITERS: Mapping[str, Callable[[Path], Replica]] = MappingProxyType(
    {
        **{kind: partial(SightReplica.write, kind) for kind in SIGHT_KINDS},
        **{kind: partial(QwenReplica.write, kind) for kind in QWEN_KINDS},
    }
)
"""What writes a tiny checkpoint of each family with sight into a folder, by its `model_type`."""
MOVED: tuple[str, ...] = (*MOVING, *QWEN_KINDS)
"""Those of them that have clips of their own."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The largest difference of any score, and whether the greedy tokens are the same."""

    apart: float
    same: bool


def picture(height: int, width: int, seed: int = 0) -> Image:
    """Noise."""
    return Image(_noise((3, height, width), seed))


def clip(frames: int, height: int, width: int, fps: float = 2.0, seed: int = 0) -> Video:
    """Frames of noise, so many a second."""
    return Video(_noise((frames, 3, height, width), seed), torch.arange(frames) / fps)


def prompts(count: int, clips: bool) -> list[Prompt]:
    """So many of them: none, one or several pictures of different sizes, and, every third time, a clip among them."""
    return [_prompt(number, clips) for number in range(count)]


def rows_of(vlm: VLM, prompts: Sequence[Prompt], tokens: int) -> list[Row]:
    """Prompts in front of our decoder with all of what was seen in them, and room for so many tokens. Raises what is wrong with any."""
    laid = lay_out(vlm, Compression(), [([], prompt) for prompt in prompts], tokens, Clock(torch.device("cpu")))
    for error in laid.errors.values():
        raise error
    return list(laid.rows.values())


@torch.no_grad()
def scores(vlm: VLM, row: Row) -> Float[Tensor, "s v"]:
    """Ours at every token of a prompt."""
    told: Tensor = vlm.decoder.logits(prefilled(vlm.decoder, [_laid(row)], (), 0)[0].hidden[0])
    return told


@torch.no_grad()
def says(vlm: VLM, rows: Sequence[Row], tokens: int) -> list[list[int]]:
    """Our greedy tokens of a batch, not stopping at the end of text. Raises ModelError where scores are not finite."""
    run, cache = prefilled(vlm.decoder, [_laid(row) for row in rows], (), tokens)
    configs = [GenerationConfig(max_tokens=tokens)] * len(rows)
    said = collect(generate(vlm.decoder, run.hidden[:, -1], cache, configs, vlm.tokenizer.decode, frozenset()), len(rows))
    for one in said:
        if isinstance(one.finish, ModelError):
            raise one.finish
    return [list(one.ids) for one in said]


def compared(replica: Replica, vlm: VLM, prompt: Prompt, tokens: int) -> Compared:
    """One prompt in both. Raises ModelError where ours cannot be run."""
    (row,) = rows_of(vlm, [prompt], tokens)
    apart = (scores(vlm, row) - replica.logits(prompt)).abs().max().item()
    return Compared(apart, says(vlm, [row], tokens) == [replica.says(prompt, tokens)])


def _laid(row: Row) -> Laid:
    return Laid(row.embeddings, row.positions, row.spans, row.deep, row.turns, row.following)


def _prompt(number: int, clips: bool) -> Prompt:
    sizes = [_SIZES[(number + place) % len(_SIZES)] for place in range(number % 4)]
    media: list[Media] = [picture(*size, seed=10 * number + place) for place, size in enumerate(sizes)]
    if clips and number % 3 == 2:
        media.insert(number % 2, clip(3 + number, 24, 32, seed=number))
    return Prompt((*media, Text(_QUESTIONS[number % len(_QUESTIONS)])))


def _noise(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
