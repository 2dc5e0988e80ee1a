"""Answers in a form through the pipeline: greedy and drawn, alone and in company, compressed, remembered in other ways, streamed."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import pydantic
import pytest
import torch

from mmsdk.answer import Answer
from mmsdk.compress import Compression, compression
from mmsdk.errors import InputError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.constrain import Constraint, guide_of
from mmsdk.generate.loop import collect, generate
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.recall import recalling
from mmsdk.stages import Clock, device_of, prepare
from mmsdk.vision.types import Image

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "thing": {"type": "string", "maxLength": 5},
        "count": {"type": "integer", "minimum": 0, "maximum": 20},
        "colours": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["thing", "count", "colours"],
    "additionalProperties": False,
}
COSTLY = r"(.*\w.{30}){4}"  # can be followed for some tokens, and no further
CHOICES = ["a red ball", "a dog", "a dog and a ball"]


def picture(seed: int) -> Image:
    generator = torch.Generator().manual_seed(seed)
    return Image(torch.randint(0, 256, (3, 56, 56), dtype=torch.uint8, generator=generator), f"picture {seed}")


def check_thing(text: str) -> None:
    """By the words of `SCHEMA`, one after the other."""
    value = json.loads(text)
    assert list(value) == ["thing", "count", "colours"]
    assert isinstance(value["thing"], str) and len(value["thing"]) <= 5
    assert type(value["count"]) is int and 0 <= value["count"] <= 20
    assert len(value["colours"]) <= 2 and set(value["colours"]) <= {"red", "blue"}


@pytest.mark.parametrize(
    ("spec", "kv"), [("identity", "dense"), ("uniform:8", "paged"), (["tome:0.5", "fastv:0.5"], "dense"), ("identity", "int8")]
)
def test_every_answer_has_the_form_whatever_is_kept_and_however_it_is_remembered(small: Mini, spec: str | list[str], kv: str) -> None:
    pipe = Pipeline(small, compression(spec), recall=recalling(kv))
    for seed, temperature in enumerate((0.0, 0.7, 1.5)):
        how: dict[str, Any] = {"max_tokens": 100, "temperature": temperature, "seed": seed}
        answer = pipe(picture(seed), "What is it?", schema=SCHEMA, **how)
        check_thing(answer)
        assert answer.finish == "stop"
        assert pipe(picture(seed), "What is it?", choice=CHOICES, **how) in CHOICES
        told = pipe([picture(seed)], "How many?", regex=r"\d{1,3} (things|words)", **how)
        assert re.fullmatch(r"\d{1,3} (things|words)", told) and told.finish == "stop"


def test_a_batch_says_what_its_questions_say_one_by_one_and_a_stream_what_the_whole_does(small: Mini) -> None:
    pipe = Pipeline(small)
    asked: Sequence[Any] = [(picture(0), "One?"), ([], "Two, with many more words than one?"), ([picture(1), picture(2)], "Three?")]
    for how in ({"temperature": 0.9, "seed": 4}, {}):
        together = pipe(asked, schema=SCHEMA, max_tokens=100, **how)
        alone = [pipe(media, words, schema=SCHEMA, max_tokens=100, **how) for media, words in asked]
        assert together == alone
        for answer in together:
            assert isinstance(answer, Answer)
            check_thing(answer)
        stream = pipe.stream(*asked[0], schema=SCHEMA, max_tokens=100, **how)
        assert "".join(stream) == alone[0] and stream.answer.finish == "stop"


def test_objects_of_a_class_have_its_fields_alone_unless_it_says_otherwise() -> None:
    class Inner(pydantic.BaseModel):
        count: int

    class Open(pydantic.BaseModel, extra="allow"):
        count: int

    class Outer(pydantic.BaseModel):
        properties: Inner
        others: list[Inner]
        open: Open
        words: dict[str, str]

    schema = json.loads(Constraint.of(schema=Outer).grammar.removeprefix("body: %json "))
    assert schema["additionalProperties"] is False and schema["$defs"]["Inner"]["additionalProperties"] is False
    assert schema["$defs"]["Open"]["additionalProperties"] is True
    assert schema["properties"]["words"]["additionalProperties"] == {"type": "string"}
    told = Outer.model_json_schema()
    # two conditions that one object is to meet, each of which knows one of its fields
    both = [{"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]} for name in ("a", "b")]

    class Joined(pydantic.BaseModel, json_schema_extra={"allOf": both}):
        a: int
        b: int

    assert json.loads(Constraint.of(schema=Joined).grammar.removeprefix("body: %json "))["allOf"] == both
    assert "additionalProperties" not in json.loads(Constraint.of(schema=told).grammar.removeprefix("body: %json "))


def test_a_class_of_pydantics_is_a_schema(small: Mini) -> None:
    """Its own schema, by which it reads the answer."""

    class Found(pydantic.BaseModel):
        count: Annotated[int, pydantic.Field(ge=0, le=9)]
        colour: Literal["red", "green"]

    pipe = Pipeline(small)
    answer = pipe([], "What?", schema=Found, max_tokens=80)
    assert answer == pipe([], "What?", schema={**Found.model_json_schema(), "additionalProperties": False}, max_tokens=80)
    assert Found.model_validate_json(answer).colour in ("red", "green")

    class Called(pydantic.BaseModel):
        how: Callable[[int], int]

    with pytest.raises(InputError, match="schema: <class .* does not give its schema: Cannot generate a JsonSchema") as refused:
        Constraint.of(schema=Called)
    assert refused.value.item == "schema"
    with pytest.raises(InputError, match="schema: it is 3, expected an object, .* or a class of Pydantic's"):
        Constraint.of(schema="3")


def test_rows_with_a_form_and_without_run_together_as_they_do_alone(small: Mini) -> None:
    pipe, ask = Pipeline(small), [([], f"Question {n}?") for n in range(4)]
    forms = [Constraint.of(), Constraint.of(schema=SCHEMA), Constraint.of(), Constraint.of(choice=CHOICES)]
    configs = [GenerationConfig(max_tokens=60, temperature=0.8 * (n > 1), seed=n, constraint=form) for n, form in enumerate(forms)]
    ready = prepare(small, Compression(), ask, 60, Clock(device_of(small)))
    assert ready.context is not None
    guides = [guide_of(form, small.tokenizer, small.stop_ids, small.decoder.config.vocabulary) for form in forms]
    hidden, cache = ready.context.hidden, ready.context.cache
    rows = collect(generate(small.decoder, hidden, cache, configs, small.tokenizer.decode, small.stop_ids, guides=guides), 4)
    settings: list[dict[str, Any]] = [{}, {"schema": SCHEMA}, {}, {"choice": CHOICES}]
    for (media, words), row, one, form in zip(ask, rows, configs, settings, strict=True):
        alone = pipe(media, words, max_tokens=60, temperature=one.temperature, seed=one.seed, **form)
        assert row.text.lstrip() == alone and row.finish == alone.finish
    check_thing(rows[1].text)
    assert rows[3].text.lstrip() in CHOICES


def test_an_answer_that_is_cut_says_so_and_one_that_just_fits_is_whole(small: Mini) -> None:
    pipe = Pipeline(small)
    whole = pipe([], "What is it?", schema=SCHEMA, max_tokens=100)
    cut = pipe([], "What is it?", schema=SCHEMA, max_tokens=whole.tokens.generated - 1)
    fits = pipe([], "What is it?", schema=SCHEMA, max_tokens=whole.tokens.generated)
    assert cut.finish == "length" and whole.startswith(cut) and cut != whole
    assert (fits, fits.finish) == (whole, "stop")


def test_penalties_and_stop_strings_keep_the_form(small: Mini) -> None:
    pipe = Pipeline(small)
    answer = pipe([], "What?", regex="(?:[ab] ){12}end", repetition_penalty=1.8, frequency_penalty=1.0, max_tokens=80)
    assert re.fullmatch("(?:[ab] ){12}end", answer)
    stopped = pipe([], "What?", schema=SCHEMA, stop=('"count"',), max_tokens=100)
    assert stopped.finish == "stop" and '"count"' not in stopped and stopped.startswith('{"thing": ')


def test_samples_of_one_question_each_have_the_form(small: Mini) -> None:
    answers = Pipeline(small)([picture(0)], "What is it?", n=5, choice=CHOICES, temperature=1.2)
    assert len(answers) == 5 and len(set(answers)) > 1 and set(answers) <= set(CHOICES)


def test_what_cannot_be_followed_is_told_before_any_work(small: Mini) -> None:
    pipe = Pipeline(small)
    for wrong in ({"schema": {"type": "strin"}}, {"regex": "("}, {"regex": r"\s+"}, {"choice": [""]}, {"regex": "a", "choice": ["a"]}):
        with pytest.raises(InputError) as refused:
            pipe(["missing.png"], "What?", **wrong)
        assert refused.value.item.split()[0] in wrong
        with pytest.raises(InputError, match=refused.value.item):
            pipe.stream(["missing.png"], "What?", **wrong)


def test_cs_12_a_form_that_becomes_too_costly_is_an_error_of_its_own(small: Mini) -> None:
    pipe = Pipeline(small)
    with pytest.raises(InputError, match="^regex: ."):
        pipe([], "What?", regex=COSTLY, max_tokens=60)
    batch = pipe([([], "What?"), ([], "Why?")], regex=COSTLY, max_tokens=60)
    assert [error.index for error in batch if isinstance(error, InputError)] == [0, 1]
    assert pipe([], "What?", choice=CHOICES) in CHOICES
