"""The ways from a prompt to an answer that must all give the same one: dense, paged, a remembered prefix, a batch, the engine."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mmsdk.answer import Answer
from mmsdk.errors import MmsdkError, ModelError
from mmsdk.generate.config import GenerationConfig
from mmsdk.models.language import blind
from mmsdk.models.types import VLM
from mmsdk.pipeline import Pipeline
from mmsdk.prompt import Ids, Prompt
from mmsdk.recall import recalling
from mmsdk.serve.engine import Engine
from mmsdk.weights.quantised import gguf_decoder

__all__ = ["PATHS", "ids_of", "text_model"]

Answers = list[str]


def text_model(path: Path, dtype: torch.dtype) -> VLM:
    """The language model of a GGUF file, which goes on with what it is given and stops at nothing but the length asked for."""
    decoder, tokenizer = gguf_decoder(path, dtype, "none")
    return blind(str(path), decoder, tokenizer, "", {}, frozenset())


def ids_of(vlm: VLM, text: str) -> list[int]:
    """What the decoder reads for a text."""
    return [number for span in vlm.layout(Prompt.of([], text)).spans if isinstance(span, Ids) for number in span.ids]


def _alone(pipe: Pipeline, texts: Sequence[str], tokens: int) -> list[Answer]:
    return [pipe([], text, max_tokens=tokens) for text in texts]


def _dense(vlm: VLM, texts: Sequence[str], tokens: int) -> Answers:
    return [str(answer) for answer in _alone(Pipeline(vlm), texts, tokens)]


def _paged(vlm: VLM, texts: Sequence[str], tokens: int) -> Answers:
    return [str(answer) for answer in _alone(Pipeline(vlm, recall=recalling("paged")), texts, tokens)]


def _remembered(vlm: VLM, texts: Sequence[str], tokens: int) -> Answers:
    """Asked a second time; ModelError where nothing of a prompt that fills a page is remembered."""
    pipe = Pipeline(vlm, recall=recalling("paged"))
    _alone(pipe, texts, 1)
    again = _alone(pipe, texts, tokens)
    for answer in again:
        if answer.tokens.prompt > 16 and not answer.tokens.recalled:
            raise ModelError(f"nothing of a prompt of {answer.tokens.prompt} tokens is remembered")
    return [str(answer) for answer in again]


def _batch(vlm: VLM, texts: Sequence[str], tokens: int) -> Answers:
    answers = Pipeline(vlm)([([], text) for text in texts], max_tokens=tokens)
    for answer in answers:
        if isinstance(answer, MmsdkError):
            raise answer
    return [str(answer) for answer in answers]


def _engine(vlm: VLM, texts: Sequence[str], tokens: int) -> Answers:
    with Engine(Pipeline(vlm), rows=4, chunk=8) as engine:
        numbers = [engine.submit([], text, GenerationConfig(max_tokens=tokens)) for text in texts]
        outcomes = engine.drain()
        return [outcomes[number].text for number in numbers]


PATHS: dict[str, Callable[[VLM, Sequence[str], int], Answers]] = {
    "dense": _dense,
    "paged": _paged,
    "prefix hit": _remembered,
    "batch": _batch,
    "engine": _engine,
}
"""By name: what a model says to each text, greedily, so many tokens."""
