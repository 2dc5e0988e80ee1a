"""From questions to answers: a batch of them at once, one in pieces, or several answers to one that is read once."""

import dataclasses
from collections.abc import Generator, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.adapters import Worn
from mmsdk.answer import Answer, Tokens
from mmsdk.compress import Compression
from mmsdk.decoder.quantised import precision
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError, MmsdkError
from mmsdk.generate.beams import search, working
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.constrain import Guide, guide_of
from mmsdk.generate.loop import Generated, Step, collect, generate
from mmsdk.generate.text import Decode
from mmsdk.kv.room import check_room
from mmsdk.kv.types import KVCache
from mmsdk.models.types import VLM
from mmsdk.recall import Recall
from mmsdk.stages import Clock, Context, Question, Row, device_of, prepare

__all__ = ["Stream", "alone", "answered", "checked", "guided", "sampled", "streamed"]

# Bytes of an answer that is given back, about, and of each of its tokens.
_ANSWER, _TOKEN = 2048, 64


def answered(
    vlm: VLM, compression: Compression, items: Sequence[Question], config: GenerationConfig, recall: Recall, worn: Worn, first: int = 0
) -> dict[int, Answer | MmsdkError]:
    """Answers and errors of rows that run together, by their place in the whole batch, which they are counted in from `first`."""
    clock = Clock(device_of(vlm))
    ready = prepare(vlm, compression, items, config.max_tokens, clock, first, recall, config.num_beams, worn)
    rows, speaker = list(ready.rows.values()), worn.decoder(vlm.decoder, list(ready.rows))
    with clock.stage("decode"):
        texts = [] if ready.context is None else _said(vlm, speaker, rows, ready.context, [config] * len(rows), clock)
    answers = {i: _answer(vlm, row, text, config, clock) for (i, row), text in zip(ready.rows.items(), texts, strict=True)}
    answers = {i: one.at(i) if isinstance(one, InputError) else one for i, one in answers.items()}
    return {**ready.errors, **answers}


def sampled(
    vlm: VLM, compression: Compression, question: Question, config: GenerationConfig, recall: Recall, worn: Worn, n: int, together: int
) -> list[Answer]:
    """So many answers to one question, whose prompt is read once; those with the seeds `seed`, `seed` + 1, ..., or the best of its beams.

    At most `together` of them are said at one time, but for beams, which go together. Raises what is wrong with the question, InputError
    for more answers than beams, and ModelError where scores are not finite.
    """
    clock = Clock(device_of(vlm))
    if config.num_beams > 1:
        return _best(vlm, compression, question, config, recall, worn, n, clock)
    configs = [dataclasses.replace(config, seed=int(config.seed) + place) for place in range(n)]
    row, context = _single(vlm, compression, question, config, recall, worn, clock, min(n, together))
    texts = list[Generated]()
    with clock.stage("decode"):
        for first in range(0, n, together):
            part = configs[first : first + together]
            rows = torch.zeros(len(part), dtype=torch.int64, device=context.hidden.device)
            copies = Context(context.hidden[rows], context.cache.select(rows))
            speaker = worn.decoder(vlm.decoder, [0] * len(part))
            texts += _said(vlm, speaker, [row] * len(part), copies, part, clock)
    return [_sound(_answer(vlm, row, *one, clock)) for one in zip(texts, configs, strict=True)]


def _best(
    vlm: VLM, compression: Compression, question: Question, config: GenerationConfig, recall: Recall, worn: Worn, n: int, clock: Clock
) -> list[Answer]:
    """The best answers of a search, fewer than `n` where there are no more."""
    if n > config.num_beams:
        raise InputError(f"it is {n}, but {config.num_beams} beams give at most as many answers; set num_beams to {n}", item="n")
    row, context = _single(vlm, compression, question, config, recall, worn, clock)
    with clock.stage("decode"):
        (found,) = search(*_given(vlm, worn.decoder(vlm.decoder, [0]), [row], context, [config], clock))
    return [_sound(_answer(vlm, row, one, config, clock)) for one in found[:n]]


def streamed(vlm: VLM, compression: Compression, question: Question, config: GenerationConfig, recall: Recall, worn: Worn) -> "Stream":
    """The answer to one question in pieces. Raises what is wrong with the question; only scores that are not finite end it later."""
    clock = Clock(device_of(vlm))
    row, context = _single(vlm, compression, question, config, recall, worn, clock)
    return Stream(_pieces(vlm, worn.decoder(vlm.decoder, [0]), row, context, config, clock))


def checked(vlm: VLM, config: GenerationConfig, n: int = 1) -> None:
    """Raise InputError, before any work, for settings that this model cannot follow, and for more answers than memory can hold.

    `n` answers are wanted of one question. A search has at most as many beams as the model has words.
    """
    guided(vlm, config)
    beams, words, device = int(config.num_beams), vlm.decoder.config.vocabulary, device_of(vlm)
    if beams > words:
        raise InputError(f"it is {beams}, but the model has {words} tokens to begin with; ask for fewer", item="num_beams")
    if beams > 1:
        check_room(working(config, words, len(vlm.stop_ids)), device, f"{beams} beams", "num_beams")
    elif n > 1:
        length = min(int(config.max_tokens), vlm.context)
        check_room(n * (_ANSWER + _TOKEN * length), torch.device("cpu"), f"{n} answers of up to {length} tokens", "n")


def guided(vlm: VLM, config: GenerationConfig) -> Guide:
    """A guide of the form that an answer is to have. Raises InputError, naming the setting, where no answer of this model's can have it."""
    return guide_of(config.constraint, vlm.tokenizer, vlm.stop_ids, vlm.decoder.config.vocabulary)


class Stream(Iterator[str]):
    """Pieces of an answer, computed as they are asked for. Leaving early costs nothing more."""

    def __init__(self, pieces: Generator[str, None, Answer]) -> None:
        self._pieces = pieces
        self._answer: Answer | None = None

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration as end:
            if end.value is not None:
                self._answer = end.value
            raise

    def close(self) -> None:
        """End it here, and give back what it holds."""
        self._pieces.close()

    @property
    def answer(self) -> Answer:
        """The whole answer with its counts and timings; reads what is left of the stream first."""
        for _ in self:
            pass
        if self._answer is None:
            raise InputError("the stream was interrupted, so there is no whole answer", item="stream")
        return self._answer


def alone(error: MmsdkError) -> MmsdkError:
    """The error of a single question, which has no place in a batch to name."""
    return error.at(None) if isinstance(error, InputError) else error


def _single(
    vlm: VLM,
    compression: Compression,
    question: Question,
    config: GenerationConfig,
    recall: Recall,
    worn: Worn,
    clock: Clock,
    copies: int = 1,
) -> tuple[Row, Context]:
    """One question up to its first token. Raises what is wrong with it."""
    ready = prepare(vlm, compression, [question], config.max_tokens, clock, 0, recall, max(copies, config.num_beams), worn)
    for error in ready.errors.values():
        raise alone(error)
    (row,) = ready.rows.values()
    assert ready.context is not None, "a row without an error has a context"
    return row, ready.context


def _given(
    vlm: VLM, speaker: Decoder, rows: Sequence[Row], context: Context, configs: Sequence[GenerationConfig], clock: Clock
) -> tuple[
    Decoder, Float[Tensor, "b d"], KVCache, Sequence[GenerationConfig], Decode, frozenset[int], list[tuple[int, ...]], float, list[Guide]
]:
    """What `generate` and `search` are told of rows that have been read."""
    words, guides = [row.words for row in rows], [guided(vlm, config) for config in configs]
    return speaker, context.hidden, context.cache, configs, vlm.tokenizer.decode, vlm.stop_ids, words, clock.began, guides


def _said(
    vlm: VLM, speaker: Decoder, rows: Sequence[Row], context: Context, configs: Sequence[GenerationConfig], clock: Clock
) -> list[Generated]:
    """The whole of every row: the best of its beams, where a row has any."""
    if any(config.num_beams > 1 for config in configs):
        return [found[0] for found in search(*_given(vlm, speaker, rows, context, configs, clock))]
    return collect(generate(*_given(vlm, speaker, rows, context, configs, clock)), len(rows))


def _pieces(vlm: VLM, speaker: Decoder, row: Row, context: Context, config: GenerationConfig, clock: Clock) -> Generator[str, None, Answer]:
    if config.num_beams > 1:
        with clock.stage("decode"):
            (found,) = _said(vlm, speaker, [row], context, [config], clock)
        answer = _sound(_answer(vlm, row, found, config, clock))
        # which beginning is the best is not known before the end
        if answer:
            yield str(answer)
        return answer
    said: list[Step] = []
    steps = generate(*_given(vlm, speaker, [row], context, [config], clock))
    begun = False
    while True:
        # only the work is timed, not what the reader does between two pieces
        with clock.stage("decode"):
            step = next(steps, None)
        if step is None:
            break
        said.append(step)
        # models begin with the space between prompt and answer, which is no part of the answer
        piece = step.text if begun else step.text.lstrip()
        if piece:
            begun = True
            yield piece
    return _sound(_answer(vlm, row, collect(said, 1)[0], config, clock))


def _answer(vlm: VLM, row: Row, text: Generated, config: GenerationConfig, clock: Clock) -> Answer | MmsdkError:
    if isinstance(text.finish, MmsdkError):
        return text.finish
    counts = Tokens(row.visual, row.kept, len(row.embeddings), len(text.ids), row.recalled)
    kind = precision(vlm.decoder)
    told = text.finish, row.sights, kind, text.logprobs, text.ids, text.score
    return Answer(text.text.lstrip(), counts, clock.timings, int(config.seed), *told)


def _sound(answer: Answer | MmsdkError) -> Answer:
    if isinstance(answer, MmsdkError):
        raise answer
    return answer
