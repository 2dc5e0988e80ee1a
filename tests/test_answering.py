"""Several answers to one question, log-probabilities, penalties and time, through the pipeline: whole, in pieces and in the engine."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise

import pytest
import torch

from mmsdk.answer import Answer
from mmsdk.compress import compression
from mmsdk.errors import InputError, ModelError
from mmsdk.generate.config import GenerationConfig
from mmsdk.kv.memory import PagedMemory
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.recall import recalling
from mmsdk.serve.engine import Engine
from mmsdk.stages import Clock, lay_out
from mmsdk.vision.types import Image

Draw = Callable[[int], Image]
Read = Callable[[Mini], AbstractContextManager[list[tuple[int, int]]]]
LONG = "Which of all the things that can be seen there is the largest one, and which one is the smallest? " * 8


@pytest.mark.parametrize("kv", ["dense", "paged", "int4"])
def test_several_answers_are_those_of_their_seeds_and_the_prompt_is_read_once(small: Mini, kv: str, picture: Draw, read: Read) -> None:
    """Beyond what is kept exactly; more answers than rows run together; those of exact kinds are a dense pipeline's."""
    pipe, plain = Pipeline(small, compression("uniform:8"), 2, recalling(kv)), Pipeline(small, compression("uniform:8"))
    with read(small) as seen:
        answers = pipe(picture(0), LONG, n=3, max_tokens=6, temperature=0.9, seed=4)
    alone = plain if kv in ("dense", "paged") else pipe
    assert answers == [alone(picture(0), LONG, max_tokens=6, temperature=0.9, seed=4 + place) for place in range(3)]
    assert [answer.seed for answer in answers] == [4, 5, 6] and len(set(answers)) == 3
    assert sum(tokens for _, tokens in seen if tokens > 1) == answers[0].tokens.prompt > 160
    assert max(rows for rows, _ in seen) == 2
    if isinstance(pipe.recall.memory, PagedMemory):
        assert pipe.recall.memory.held == 0


def test_one_answer_and_greedy_ones_come_as_a_list_too(small: Mini, picture: Draw) -> None:
    pipe = Pipeline(small)
    one = pipe(picture(0), "What is it?", max_tokens=6)
    assert pipe(picture(0), "What is it?", max_tokens=6, n=1) == [one]
    assert (
        pipe(picture(0), "What is it?", max_tokens=6, n=3, compress="fastv:0.5")
        == [pipe(picture(0), "What is it?", max_tokens=6, compress="fastv:0.5")] * 3
    )
    with pytest.raises(InputError, match="^n: it is 0, expected a whole number of at least 1"):
        pipe([], "What?", n=0)
    with pytest.raises(InputError, match="n: several answers are given to one question"):
        pipe([([], "What?")], n=2)  # type: ignore[call-overload]
    with pytest.raises(InputError, match="nowhere.png"):
        pipe("nowhere.png", "What?", n=2)


def test_scores_that_are_not_finite_fail_several_answers_as_they_fail_one(small: Mini) -> None:
    before = small.decoder.norm.weight.clone()
    try:
        small.decoder.norm.weight.fill_(torch.nan)
        with pytest.raises(ModelError, match="not finite"):
            Pipeline(small)([], "What?", n=2)
    finally:
        small.decoder.norm.weight.copy_(before)


def test_logprobs_are_the_same_whole_in_pieces_in_a_batch_and_in_the_engine(small: Mini, picture: Draw) -> None:
    """Of every token, stop string included, and of the distribution as it was before temperature and penalties."""
    pipe, words, whole = Pipeline(small), "What is it?", {"max_tokens": 8, "logprobs": 3}
    answer = pipe(picture(0), words, max_tokens=8, logprobs=3)
    assert len(answer.logprobs) == answer.tokens.generated == 8 and all(len(one.top) == 3 for one in answer.logprobs)
    assert all(one.top[0].id == one.id and one.top[0].logprob == one.logprob for one in answer.logprobs)
    assert all(high.logprob >= low.logprob for one in answer.logprobs for high, low in pairwise(one.top))
    assert pipe.vlm.tokenizer.decode([one.id for one in answer.logprobs]).lstrip() == answer
    stream = pipe.stream(picture(0), words, max_tokens=8, logprobs=3)
    assert "".join(stream) == answer and stream.answer.logprobs == answer.logprobs
    (first, second) = pipe([(picture(0), words), ([], "And two?")], max_tokens=8, logprobs=3)
    assert isinstance(first, Answer) and [one.id for one in first.logprobs] == [one.id for one in answer.logprobs] and second
    warm = pipe(picture(0), words, max_tokens=8, logprobs=3, temperature=0.7, repetition_penalty=1.4, seed=1)
    assert warm.logprobs[0].top == answer.logprobs[0].top
    engine = Engine(pipe)
    number = engine.submit(picture(0), words, GenerationConfig(**whole))  # type: ignore[arg-type]
    told = engine.drain()[number].logprobs
    assert [one.id for one in told] == [one.id for one in answer.logprobs]
    assert [one.logprob for one in told] == pytest.approx([one.logprob for one in answer.logprobs], abs=1e-4)
    assert pipe(picture(0), words, max_tokens=4).logprobs == ()


# Such a small model says nothing twice by itself.
PENALISED = [
    {"repetition_penalty": 0.2},
    {"repetition_penalty": 0.2, "presence_penalty": 1.5, "frequency_penalty": 1.0},
    {"repetition_penalty": 0.2, "frequency_penalty": 0.5, "temperature": 0.8, "seed": 3},
]


def test_penalties_are_the_same_whole_in_pieces_in_a_batch_and_in_the_engine(small: Mini, picture: Draw) -> None:
    """In the engine also where a request is set aside and read again."""
    pipe, items, found = Pipeline(small), [(picture(0), "What is it? What is it?"), ([], "Say on.")], set[tuple[str, ...]]()
    for settings in PENALISED:
        alone = [pipe(*item, max_tokens=9, **settings) for item in items]  # type: ignore[call-overload]
        assert pipe(items, max_tokens=9, **settings) == alone  # type: ignore[call-overload]
        assert "".join(pipe.stream(*items[0], max_tokens=9, **settings)) == alone[0]  # type: ignore[arg-type]
        engine = Engine(pipe, tokens=48)
        for media, words in items:
            engine.submit(media, words, GenerationConfig(max_tokens=9, **settings))  # type: ignore[arg-type]
        outcomes = engine.drain()
        assert [outcomes[number].text for number in sorted(outcomes)] == alone
        found.add(tuple(map(str, alone)))
    assert len({*found, tuple(pipe(*item, max_tokens=9) for item in items)}) == 4  # type: ignore[call-overload]


def test_of_a_prompt_its_words_are_heard_and_its_pictures_are_not(small: Mini, picture: Draw) -> None:
    clock = Clock(torch.device("cpu"))
    (row,) = lay_out(small, compression("identity"), [([picture(0), picture(1)], "What?")], 4, clock).rows.values()
    assert list(row.words) == [1, *small.tokenizer.encode("Question: What?\nAnswer:")] and len(row.embeddings) == 32 + len(row.words)


def test_time_ends_an_answer_between_tokens(small: Mini) -> None:
    """The work before the first token counts, and one is always said."""
    pipe = Pipeline(small)
    whole = pipe([], "Say on.", max_tokens=16, max_time=1000.0)
    assert whole.finish == "length" and whole == pipe([], "Say on.", max_tokens=16)
    short = pipe([], "Say on.", max_tokens=16, max_time=1e-9)
    assert short.finish == "time" and short.tokens.generated == 1 and whole.startswith(short)
    stream = pipe.stream([], "Say on.", max_tokens=16, max_time=1e-9)
    assert "".join(stream) == short and stream.answer.finish == "time"
    engine = Engine(pipe)
    number = engine.submit([], "Say on.", GenerationConfig(max_tokens=16, max_time=1e-9))
    assert engine.drain()[number].finish == "time"


def test_pb_12_stop_strings_end_a_stream_where_they_end_the_whole(small: Mini) -> None:
    """Across borders of tokens: a string that begins in one and ends in another."""
    pipe = Pipeline(small)
    text, pieces = pipe([], "Say on.", max_tokens=16), list(pipe.stream([], "Say on.", max_tokens=16))
    borders = [sum(map(len, pieces[:place])) for place in range(1, len(pieces))]
    cut = next(at for at in borders if at > 6 and text.index(text[at - 2 : at + 2]) == at - 2)
    for stop in ((text[cut - 2 : cut + 2],), (text[cut - 2 : cut + 2], text[cut - 2 : cut + 1])):
        stream = pipe.stream([], "Say on.", max_tokens=16, stop=stop)
        assert "".join(stream) == pipe([], "Say on.", max_tokens=16, stop=stop) == text[: cut - 2]
        assert stream.answer.finish == "stop"


def test_no_piece_of_a_stream_holds_half_a_character(small: Mini) -> None:
    """Byte for byte drawn from anywhere in the vocabulary: every piece is text, and joined they are the whole."""
    for seed in range(3):
        settings = {"max_tokens": 12, "temperature": 50.0, "seed": seed}
        stream = Pipeline(small).stream([], "Say on.", **settings)  # type: ignore[arg-type]
        pieces = list(stream)
        assert "".join(pieces) == Pipeline(small)([], "Say on.", **settings)  # type: ignore[call-overload]
        assert all(piece and piece.encode() for piece in pieces)
