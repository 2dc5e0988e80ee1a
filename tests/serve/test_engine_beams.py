"""Beams in an engine: the answers of transformers and of the pipeline, beside others, over every memory; and nothing held afterwards."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from mmsdk.answer import Answer
from mmsdk.compress import compression
from mmsdk.errors import InputError, ModelError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.constrain import Constraint
from mmsdk.generate.loop import Generated
from mmsdk.models.mini.family import Mini
from mmsdk.models.text import read_decoder
from mmsdk.pipeline import Pipeline
from mmsdk.recall import recalling
from mmsdk.serve.engine import Engine, Outcome
from mmsdk.serve.job import Job
from mmsdk.serve.pools import PagedPool
from mmsdk.vision.types import Image

Draw = Callable[[int], Image]
LONG = "Which of all the things that can be seen there is the largest one, and which one is the smallest? "
# What each request is asked for: searches of several widths beside a greedy answer and a drawn one.
ASKED: list[dict[str, Any]] = [
    {"num_beams": 3, "max_tokens": 12},
    {"max_tokens": 20},
    {"num_beams": 4, "max_tokens": 7, "length_penalty": 2.0, "early_stopping": True, "logprobs": 2},
    {"temperature": 0.8, "seed": 4, "max_tokens": 15},
    {"num_beams": 2, "max_tokens": 16, "repetition_penalty": 0.3, "presence_penalty": 0.5},
]


def request(number: int, picture: Draw) -> tuple[list[Image], str]:
    return [picture(number)][: number % 2], f"Question {number}: " + LONG * (1 + number % 3)


def told(answers: Sequence[Answer | Generated]) -> list[tuple[str, tuple[int, ...], object]]:
    return [(one.lstrip() if isinstance(one, str) else one.text.lstrip(), one.ids, one.finish) for one in answers]


def held_to(outcomes: dict[int, Outcome], wanted: Sequence[Sequence[Answer]]) -> None:
    """Every answer of every search, with its score; of others the one there is."""
    for (_, outcome), answers in zip(sorted(outcomes.items()), wanted, strict=True):
        assert (outcome.text, outcome.ids, outcome.finish) == (str(answers[0]), answers[0].ids, answers[0].finish)
        assert told(outcome.found or (outcome,)) == told(answers)  # type: ignore[arg-type]
        assert [one.score for one in outcome.found] == pytest.approx([one.score for one in answers][: len(outcome.found)], rel=1e-4)
        assert [one.id for one in outcome.logprobs] == [one.id for one in answers[0].logprobs]


def alone(pipe: Pipeline, picture: Draw) -> list[list[Answer]]:
    return [pipe(*request(number, picture), n=how.get("num_beams", 1), **how) for number, how in enumerate(ASKED)]


@pytest.fixture(scope="module")
def wanted(small: Mini, picture: Draw) -> list[list[Answer]]:
    return alone(Pipeline(small), picture)


def test_answers_and_scores_are_those_of_transformers(small: Mini, tmp_path: Path) -> None:
    """A real llama of mini's vocabulary, of several questions together."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=None, initializer_range=0.4,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    logging.enable_progress_bar()
    engine = Engine(Pipeline(replace(small, decoder=read_decoder(tmp_path, torch.float32))), rows=8, chunk=16)
    words, settings = ["What is it?", LONG, "And why?"], {"max_tokens": 9, "num_beams": 3, "length_penalty": 0.5}
    for question in words:
        engine.submit([], question, GenerationConfig(**settings))  # type: ignore[arg-type]
    outcomes = engine.drain()
    for number, question in enumerate(words, start=1):
        ids = torch.tensor([[1, *small.tokenizer.encode(f"Question: {question}\nAnswer:")]])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, num_beams=3, num_return_sequences=3,
            length_penalty=0.5, eos_token_id=sorted(small.stop_ids), pad_token_id=0, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        said = [[token for token in row if token not in small.stop_ids] for row in out.sequences[:, ids.shape[1] :].tolist()]
        assert [list(one.ids) for one in outcomes[number].found] == said and len(said) == 3
        assert [one.score for one in outcomes[number].found] == pytest.approx(out.sequences_scores.tolist(), rel=1e-4)
    assert engine.held == 0


@pytest.mark.parametrize(("rows", "chunk", "tokens"), [(12, 256, 0), (4, 16, 0), (5, 40, 512)])
def test_every_schedule_finds_what_the_pipeline_finds(
    small: Mini, wanted: list[list[Answer]], picture: Draw, rows: int, chunk: int, tokens: int
) -> None:
    engine = Engine(Pipeline(small), rows=rows, chunk=chunk, tokens=tokens)
    for number, how in enumerate(ASKED):
        engine.submit(*request(number, picture), GenerationConfig(**how))
    held_to(engine.drain(), wanted)
    assert engine.held == 0 and not engine.busy


@pytest.mark.parametrize("kv", ["int4", "turbo4", "snapkv:0.5,window=8", "h2o:60", "tiered:0.5"])
def test_every_memory_finds_what_the_pipeline_finds_with_it(small: Mini, kv: str, picture: Draw) -> None:
    pipe = Pipeline(small, compression("uniform:8"), recall=recalling(kv))
    engine = Engine(pipe, rows=6, tokens=4096)
    for number, how in enumerate(ASKED):
        engine.submit(*request(number, picture), GenerationConfig(**how))
    held_to(engine.drain(), alone(pipe, picture))
    assert engine.held == 0


def test_beams_share_the_blocks_of_the_prompt(small: Mini) -> None:
    """Four of them hold its full blocks once, and less than three each of their own."""
    engine, most = Engine(Pipeline(small), rows=4), 0
    engine.submit([], LONG * 3, GenerationConfig(num_beams=4, max_tokens=20))
    while engine.busy:
        engine.step()
        most = max(most, engine.held)
    prompt = 1 + len(small.tokenizer.encode(f"Question: {LONG * 3}\nAnswer:"))
    layers, full = small.decoder.config.layers, prompt // 16
    assert full > 3 and layers * full < most <= layers * (full + 1 + 4 * 2)
    pool = engine._pool
    assert isinstance(pool, PagedPool) and engine.held == 0
    engine.close()
    assert pool.blocks.blocks.held == 0


def test_a_search_that_is_set_aside_finds_the_same(small: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pool that holds hardly more than one of three; the earliest is never the one that waits."""
    set_aside, original = list[int](), Engine._wait_again

    def noted(engine: Engine, job: Job) -> None:
        set_aside.append(job.number)
        original(engine, job)

    monkeypatch.setattr(Engine, "_wait_again", noted)
    pipe, how = Pipeline(small), {"num_beams": 3, "max_tokens": 30}
    engine = Engine(pipe, rows=9, tokens=224)
    for number in range(3):
        engine.submit([], f"And {number}?", GenerationConfig(**how))  # type: ignore[arg-type]
    outcomes = engine.drain()
    assert set_aside and 1 not in set_aside and engine.held == 0
    held_to(outcomes, [pipe([], f"And {number}?", n=3, num_beams=3, max_tokens=30) for number in range(3)])


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9])
def test_cs_11_a_cancelled_search_frees_all_its_rows(small: Mini, wanted: list[list[Answer]], picture: Draw, steps: int) -> None:
    """While it waits, is read, searches; the others find what they would have found, and what is broken off holds nothing."""
    engine, events = Engine(Pipeline(small), rows=12, chunk=40), []
    numbers = [engine.submit(*request(number, picture), GenerationConfig(**how)) for number, how in enumerate(ASKED)]
    for _ in range(steps):
        events += engine.step()
    going = [number for number in numbers if not any(event.number == number and event.finish for event in events)]
    gone = next(number for number in going if "num_beams" in ASKED[number - 1])
    assert engine.cancel(gone) and not engine.cancel(gone)
    while engine.busy:
        events += engine.step()
    for number, answers in zip(numbers, wanted, strict=True):
        if number != gone:
            assert "".join(event.text for event in events if event.number == number) == answers[0]
    assert engine.held == 0
    engine.submit(*request(0, picture), GenerationConfig(**ASKED[0]))
    for _ in range(4):
        engine.step()
    assert engine.held > 0
    engine.close()
    assert engine.held == 0 and not engine.busy


def test_cs_12_what_is_wrong_with_a_search_ends_it_alone(small: Mini, wanted: list[list[Answer]], picture: Draw) -> None:
    """More beams than rows or tokens, a form that nothing has, scores that are no numbers: the searches beside them find theirs."""
    others = {i for number in range(len(ASKED)) for i in small.tokenizer.encode(f"Question: {request(number, picture)[1]}")}
    broken = [i for i in small.tokenizer.encode("Question: zebra") if i not in others]
    before = small.decoder.embedding.weight[broken].clone()
    try:
        small.decoder.embedding.weight[broken] = torch.nan
        engine, beams = Engine(Pipeline(small), rows=4, tokens=1024), GenerationConfig(num_beams=3, max_tokens=8)
        wide = engine.submit([], "What?", replace(beams, num_beams=5))
        long = engine.submit([], "What?", replace(beams, max_tokens=400))
        form = engine.submit([], "What?", replace(beams, constraint=Constraint.of(regex=r"\s+")))
        good = engine.submit(*request(0, picture), GenerationConfig(**ASKED[0]))
        bad = engine.submit([], "zebra", beams)
        outcomes = engine.drain()
    finally:
        small.decoder.embedding.weight[broken] = before
    for number, item in ((wide, "num_beams"), (long, "prompt"), (form, "regex")):
        finish = outcomes[number].finish
        assert isinstance(finish, InputError) and finish.item == item
    assert isinstance(outcomes[bad].finish, ModelError)
    held_to({good: outcomes[good]}, [wanted[0]])
    assert engine.held == 0


def test_beams_keep_to_a_form(small: Mini, picture: Draw) -> None:
    pipe, engine = Pipeline(small), Engine(Pipeline(small), rows=6)
    choices = ["a red ball", "a dog", "a dog and a ball"]
    engine.submit(picture(0), "What is it?", GenerationConfig(num_beams=6, max_tokens=20, constraint=Constraint.of(choice=choices)))
    engine.submit(picture(0), "What is it?", GenerationConfig(num_beams=3, max_tokens=9, constraint=Constraint.of(regex=r"\d{2}")))
    free = pipe(picture(0), "What is it?", n=6, num_beams=6, max_tokens=20, choice=choices)
    held_to(engine.drain(), [free, pipe(picture(0), "What is it?", n=3, num_beams=3, max_tokens=9, regex=r"\d{2}")])
    assert set(free) <= set(choices)


def test_what_was_seen_comes_with_the_answer_as_from_the_pipeline(small: Mini, picture: Draw) -> None:
    """What compression left of each picture, measured: with the last event alone."""
    pipe = Pipeline(small, compression("uniform:8"))
    engine, words = Engine(pipe), "What is it?"
    for how in ({"max_tokens": 3}, {"max_tokens": 3, "num_beams": 2}):
        engine.submit([picture(0), picture(1)], words, GenerationConfig(**how))
    events = [event for _ in range(9) for event in engine.step()]
    answer = pipe([picture(0), picture(1)], words, max_tokens=3)
    ends = [event for event in events if event.finish is not None]
    assert len(ends) == 2 and not any(event.sights for event in events if event.finish is None)
    for event in ends:
        assert [sight.fidelity for sight in event.sights] == [sight.fidelity for sight in answer.sights]
        assert all(sight.fidelity is not None and sight.fidelity.nqe > 0 for sight in event.sights)
