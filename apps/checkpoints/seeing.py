"""A family with sight beside its replica: scores at every token of prompts about pictures and clips, and greedy tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.compress import Compression
from mmsdk.decoder.prefill import Laid, prefilled
from mmsdk.errors import ModelError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.loop import collect, generate
from mmsdk.models.types import VLM
from mmsdk.prompt import Prompt, Text
from mmsdk.stages import Clock, lay_out
from mmsdk.vision.types import Image, Media, Video

__all__ = ["Compared", "Replica", "compared", "prompts"]

_SIZES = ((32, 48), (24, 24), (40, 16), (61, 90), (16, 101))


@runtime_checkable
class Replica(Protocol):
    """A model of transformers; prompts are media, then words."""

    def logits(self, prompt: Prompt) -> Float[Tensor, "s v"]:
        """Scores at every token."""
        ...

    def says(self, prompt: Prompt, tokens: int) -> list[int]:
        """Greedy tokens, not stopping at the end of text."""
        ...


@dataclass(frozen=True, slots=True)
class Compared:
    """The largest difference of any score, and whether the greedy tokens are the same."""

    apart: float
    same: bool


def prompts(count: int, clips: bool) -> list[Prompt]:
    """So many of them: none, one or several pictures of different sizes, and, every third time, a clip among them."""
    return [_prompt(number, clips) for number in range(count)]


@torch.no_grad()
def compared(replica: Replica, vlm: VLM, prompt: Prompt, tokens: int) -> Compared:
    """One prompt in both. Raises ModelError where ours cannot be run."""
    laid = lay_out(vlm, Compression(), [(list(prompt.media), prompt.text)], tokens, Clock(torch.device("cpu")))
    for error in laid.errors.values():
        raise error
    (row,) = laid.rows.values()
    ours = Laid(row.embeddings, row.positions, row.spans, row.deep, row.turns, row.following)
    run, cache = prefilled(vlm.decoder, [ours], (), tokens)
    scores: Tensor = vlm.decoder.logits(run.hidden[0])
    steps = generate(vlm.decoder, run.hidden[:, -1], cache, [GenerationConfig(max_tokens=tokens)], vlm.tokenizer.decode, frozenset())
    (said,) = collect(steps, 1)
    if isinstance(said.finish, ModelError):
        raise said.finish
    return Compared((scores - replica.logits(prompt)).abs().max().item(), list(said.ids) == replica.says(prompt, tokens))


def _prompt(number: int, clips: bool) -> Prompt:
    generator = torch.Generator().manual_seed(number)
    media: list[Media] = [_picture(*_SIZES[(number + place) % len(_SIZES)], generator) for place in range(number % 4)]
    if clips and number % 3 == 2:
        media.insert(number % 2, Video(_noise((3 + number, 3, 24, 32), generator), torch.arange(3 + number) / 2))
    return Prompt((*media, Text(_QUESTIONS[number % len(_QUESTIONS)])))


_QUESTIONS: Sequence[str] = ("What is two and two?", "What is this?", "Which is the widest?", "What happens?")


def _picture(height: int, width: int, generator: torch.Generator) -> Image:
    return Image(_noise((3, height, width), generator))


def _noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
