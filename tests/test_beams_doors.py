"""Beams through everything that answers: calls, batches, several answers, streams, conversations, streams without end, forms, engines."""

import dataclasses
import tracemalloc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from mmsdk.answer import Answer
from mmsdk.chat import Chat
from mmsdk.compress import compression
from mmsdk.errors import InputError
from mmsdk.generate.beams import working
from mmsdk.generate.config import GenerationConfig
from mmsdk.kv.memory import DenseMemory, PagedMemory
from mmsdk.kv.room import check_copies, memory_free
from mmsdk.kv.shape import Shape
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.recall import recalling
from mmsdk.vision.types import Image

Draw = Callable[[int], Image]
Read = Callable[[Mini], AbstractContextManager[list[tuple[int, int]]]]
LONG = "Which of all the things that can be seen there is the largest one, and which one is the smallest? " * 8
BEAMS: dict[str, Any] = {"num_beams": 3, "max_tokens": 6}


@pytest.fixture(scope="module")
def best(small: Mini, picture: Draw) -> list[Answer]:
    """The answers of three beams to a long question."""
    return Pipeline(small, compression("uniform:8"))(picture(0), LONG, n=3, **BEAMS)


@pytest.mark.parametrize("kv", ["dense", "paged", "int4", "snapkv:0.5", "tiered:0.5"])
def test_several_answers_are_the_best_of_all_beams_and_the_prompt_is_read_once(
    small: Mini, best: list[Answer], kv: str, picture: Draw, read: Read
) -> None:
    pipe = Pipeline(small, compression("uniform:8"), 2, recalling(kv))
    with read(small) as seen:
        answers = pipe(picture(0), LONG, n=3, **BEAMS)
    assert len({answer.ids for answer in answers}) == 3 and [one.seed for one in answers] == [0, 0, 0]
    assert 0 > answers[0].score >= answers[1].score >= answers[2].score
    assert sum(tokens for _, tokens in seen if tokens > 1) == answers[0].tokens.prompt > 160
    assert max(rows for rows, _ in seen) == 3 and len([1 for _, tokens in seen if tokens == 1]) <= 5
    if kv in ("dense", "paged"):
        assert [answer.ids for answer in answers] == [answer.ids for answer in best]
    one = pipe(picture(0), LONG, **BEAMS)
    assert (one, one.ids) == (answers[0], answers[0].ids) and one.score == pytest.approx(answers[0].score, rel=1e-4)
    if isinstance(pipe.recall.memory, PagedMemory):
        assert pipe.recall.memory.held == 0
        assert pipe(picture(0), LONG, **BEAMS).tokens.recalled > 100


def test_a_batch_of_unlike_rows_and_its_errors(small: Mini, picture: Draw, read: Read) -> None:
    """No more rows together than the pipeline runs, beams counted."""
    pipe = Pipeline(small, batch_size=7)
    asked = [(picture(0), "What is it?"), ("missing.png", "What?"), ([], LONG), (picture(1), "And this?")]
    with read(small) as seen:
        answers = pipe(asked, **BEAMS)
    assert max(rows for rows, _ in seen) == 6
    assert isinstance(answers[1], InputError) and answers[1].index == 1
    for place in (0, 2, 3):
        alone, answer = pipe(*asked[place], **BEAMS), answers[place]
        assert isinstance(answer, Answer) and answer.ids == alone.ids and answer.score == pytest.approx(alone.score, rel=1e-4)


def test_a_stream_is_one_piece_and_may_be_left(small: Mini, picture: Draw) -> None:
    pipe = Pipeline(small, recall=recalling("paged"))
    whole, stream = pipe(picture(0), "What is it?", **BEAMS), pipe.stream(picture(0), "What is it?", **BEAMS)
    assert list(stream) == [str(whole)] and stream.answer.ids == whole.ids and stream.answer.score == pytest.approx(whole.score)
    left = pipe.stream(picture(0), "What is it?", **BEAMS)
    left.close()
    del left, stream
    assert isinstance(pipe.recall.memory, PagedMemory) and pipe.recall.memory.held == 0


@pytest.mark.parametrize("kv", ["dense", "paged", "int4", "h2o:0.5"])
def test_conversations_go_on_behind_the_best_answer(small: Mini, kv: str, picture: Draw) -> None:
    """Turns without beams between, and more beams than a conversation began with."""
    pipe = Pipeline(small, recall=recalling(kv))
    chat = pipe.chat()
    chat(picture(0), LONG, config=GenerationConfig(max_tokens=4))
    turns = [chat("And this?", config=GenerationConfig(max_tokens=6, num_beams=beams)) for beams in (2, 5)]
    again: Chat = pipe.chat()
    again(picture(0), LONG, config=GenerationConfig(max_tokens=4))
    assert again("And this?", config=GenerationConfig(max_tokens=6, num_beams=2)).ids == turns[0].ids
    assert all(turn.score < 0 for turn in turns)
    if kv in ("dense", "paged"):
        assert turns[1].tokens.recalled > 150
    assert chat("And now?", config=GenerationConfig(max_tokens=4)).score == 0


def test_a_stream_without_end_answers_by_beams_and_keeps_what_was_said(small: Mini, picture: Draw) -> None:
    stream = Pipeline(small).stream_session("window:256")
    for second in range(3):
        stream.push(picture(second).pixels, float(second))
    before = stream.held
    answer = stream.ask("What is it?", **BEAMS)
    assert answer.score < 0 and stream.held == before and stream.ask("What is it?", **BEAMS).ids == answer.ids
    assert stream.ask("What is it?", keep=True, **BEAMS).ids == answer.ids and stream.held > before


def test_beams_keep_to_a_form(small: Mini, picture: Draw) -> None:
    """Choices are counted out: the best beam is the likeliest of them, of a length that says the same."""
    pipe = Pipeline(small, recall=recalling("paged"))
    choices = ["a red ball", "a dog", "a dog and a ball"]
    answers = pipe(picture(0), "What is it?", n=6, num_beams=6, max_tokens=20, choice=choices)
    assert set(answers) <= set(choices) and len(set(answers)) > 1 and all(answer.finish == "stop" for answer in answers)
    assert [one.score for one in answers] == sorted((one.score for one in answers), reverse=True)
    assert pipe(picture(0), "How many?", num_beams=3, regex=r"\d{2}").isdigit()
    with pytest.raises(InputError, match="n: it is 4"):
        pipe(picture(0), "What is it?", n=4, num_beams=3)


def test_drawing_refuses_beams(small: Mini) -> None:
    with pytest.raises(InputError, match="num_beams"):
        Pipeline(small)([], "What?", num_beams=2, temperature=0.5)


def test_more_beams_than_words_and_more_answers_than_memory_are_refused_before_any_work(small: Mini, picture: Draw, read: Read) -> None:
    pipe = Pipeline(small)
    words, config = small.decoder.config.vocabulary, GenerationConfig(max_tokens=2, num_beams=100_000)
    with read(small) as seen:
        for beams in (words + 1, 100_000, 2**62):
            with pytest.raises(InputError, match=f"^num_beams: it is {beams}, but the model has {words} tokens"):
                pipe(picture(0), "What is it?", max_tokens=2, num_beams=beams)
        with pytest.raises(InputError, match="^num_beams: it is 100000"):
            pipe.stream(picture(0), "What is it?", num_beams=100_000)
        with pytest.raises(InputError, match="^num_beams: it is 100000"):
            pipe.chat()("What is it?", config=config)
        with pytest.raises(InputError, match="^num_beams: it is 100000"):
            pipe([([], "What is it?")] * 3, num_beams=100_000)
        for n in (10**10, 2**62):
            with pytest.raises(InputError, match=f"^n: {n} answers of up to 128 tokens would take about .* GiB are free; ask for fewer"):
                pipe(picture(0), "What is it?", n=n)
    assert seen == []
    stream = pipe.stream_session("window:256")
    stream.push(picture(0).pixels, 0.0)
    with pytest.raises(InputError, match="^num_beams: it is 100000"):
        stream.ask("What is it?", num_beams=100_000)


def test_what_a_step_takes_is_told_from_above(small: Mini) -> None:
    """By Python's own count of its objects; a search of many beams takes most of its memory in these."""
    pipe, config = Pipeline(small), GenerationConfig(max_tokens=3, num_beams=100)
    told = working(config, small.decoder.config.vocabulary, len(small.stop_ids))
    tracemalloc.start()
    pipe([], "What is it?", max_tokens=3, num_beams=100)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.05 * told < taken < told, (taken, told)


def test_copies_of_a_cache_that_memory_cannot_hold_are_refused() -> None:
    cpu = torch.device("cpu")
    shape = Shape(2, 2, 8, torch.float32, cpu)
    each, free = 2 * 2 * 2 * 8 * 4, memory_free(cpu)
    most = free // (2 * 1000 * each)
    check_copies(shape, DenseMemory(), 1, 1000, 10, most // 2, "num_beams")
    with pytest.raises(InputError, match="^num_beams: .* answers at one time of up to 10 tokens each would take about"):
        check_copies(shape, DenseMemory(), 1, 1000, 10, 2 * most, "num_beams")
    # in blocks a copy has what is its own alone
    check_copies(shape, PagedMemory(), 1, 100_000, 10, most, "num_beams")
    with pytest.raises(InputError, match="^num_beams"):
        check_copies(dataclasses.replace(shape, head_dim=(10**6, 10**6)), PagedMemory(), 1, 1000, 10, most, "num_beams")


@pytest.mark.parametrize("kv", ["dense", "paged"])
def test_copies_are_counted_before_the_cache_is_made(small: Mini, kv: str, monkeypatch: pytest.MonkeyPatch, read: Read) -> None:
    """On a machine whose memory is gone when the prompt is laid out."""
    pipe = Pipeline(small, recall=recalling(kv))
    free = iter([2**40, 1])
    monkeypatch.setattr("mmsdk.kv.room.memory_free", lambda device: next(free))
    with read(small) as seen, pytest.raises(InputError, match="3 answers at one time of up to 40 tokens"):
        pipe([], LONG, num_beams=3, max_tokens=40)
    assert seen == []
