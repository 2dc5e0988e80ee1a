"""Answers in a form in an engine: with others that have none, set aside and taken up again, broken alone."""

from typing import Any

import pytest
import torch

from mmsdk.answer import Answer
from mmsdk.compress import compression
from mmsdk.errors import InputError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.constrain import Constraint
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.serve.engine import Engine
from mmsdk.serve.job import Job
from mmsdk.vision.types import Image

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "thing": {"type": "string", "maxLength": 6},
        "many": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 4, "maxItems": 9},
    },
    "required": ["thing", "many"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"schema": SCHEMA},
    {},
    {"choice": ["a dog", "a dog and a cat"]},
    {"regex": "(?:[a-f]{3} ){6}end"},
    {},
    {"schema": SCHEMA},
]


def picture(seed: int) -> Image:
    generator = torch.Generator().manual_seed(seed)
    return Image(torch.randint(0, 256, (3, 56, 56), dtype=torch.uint8, generator=generator), f"picture {seed}")


def asked(number: int) -> tuple[list[Image], str, dict[str, Any]]:
    """Greedy and drawn in turn, with a picture and without."""
    how = {"max_tokens": 60, "temperature": 0.9 * (number % 2), "seed": number}
    return [picture(number)][: number % 3], f"Question {number}: what is it?", how


def submit(engine: Engine, number: int) -> int:
    media, words, how = asked(number)
    return engine.submit(media, words, GenerationConfig(**how, constraint=Constraint.of(**FORMS[number])))


@pytest.fixture(scope="module")
def pipe(small: Mini) -> Pipeline:
    return Pipeline(small, compression("uniform:8"))


@pytest.fixture(scope="module")
def wanted(pipe: Pipeline) -> list[Answer]:
    """One by one."""
    return [pipe(media, words, **how, **form) for (media, words, how), form in zip(map(asked, range(len(FORMS))), FORMS, strict=True)]


@pytest.mark.parametrize("tokens", [0, 128])
def test_every_form_is_kept_and_every_answer_is_that_of_one_by_one(
    pipe: Pipeline, wanted: list[Answer], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_aside, original = list[int](), Engine._wait_again

    def noted(engine: Engine, job: Job) -> None:
        set_aside.append(len(job.said))
        original(engine, job)

    monkeypatch.setattr(Engine, "_wait_again", noted)
    engine = Engine(pipe, rows=4, tokens=tokens)
    numbers = [submit(engine, number) for number in range(len(FORMS))]
    outcomes = engine.drain()
    found = [outcomes[number] for number in numbers]
    assert [(one.text, one.finish) for one in found] == [(str(answer), answer.finish) for answer in wanted]
    assert engine.held == 0
    # in the small pool some wait amid their form, and go on in it
    assert any(set_aside) == (tokens > 0)


def test_cs_12_a_form_that_becomes_too_costly_ends_alone_with_an_error(small: Mini) -> None:
    engine, costly = Engine(Pipeline(small)), Constraint.of(regex=r"(.*\w.{30}){4}")
    free = engine.submit([], "Question 1: what is it?", GenerationConfig(max_tokens=60, temperature=0.9, seed=1))
    broken = [
        engine.submit([], "What?", GenerationConfig(max_tokens=60, temperature=3.0, seed=seed, constraint=costly)) for seed in range(3)
    ]
    never = engine.submit([], "What?", GenerationConfig(constraint=Constraint.of(regex=r"\s+")))
    outcomes = engine.drain()
    ends = [outcomes[number].finish for number in broken]
    assert all(isinstance(end, InputError) and end.item == "regex" for end in ends)
    wrong = outcomes[never].finish
    assert isinstance(wrong, InputError) and wrong.item == "regex"
    assert outcomes[free].text == Pipeline(small)([], "Question 1: what is it?", max_tokens=60, temperature=0.9, seed=1)
    assert engine.held == 0 and not engine.busy
