"""`mmsdk serve` asked for answers in a form: by OpenAI's own client as it does, and with the fields of vLLM's."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ConfigDict, Field

from mmsdk.apps.serve.server import serving
from mmsdk.apps.serve.service import Service
from mmsdk.apps.serve.settings import Settings
from mmsdk.compress import compression
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline


class Seen(BaseModel):
    """What OpenAI's client makes a schema of, and reads the answer by."""

    model_config = ConfigDict(extra="forbid")
    thing: str = Field(max_length=5)
    count: int = Field(ge=0, le=20)
    colour: Literal["red", "blue"]


SCHEMA = Seen.model_json_schema()
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "seen", "schema": SCHEMA, "strict": True}}
HOW: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "What is it?"}], "max_tokens": 60}


@pytest.fixture(scope="module")
def client(small: Mini) -> Iterator[openai.OpenAI]:
    service = Service(Pipeline(small, compression("uniform:8")), Settings(rows=4, tokens=300, seconds=60))
    with serving(service) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as asking:
        yield asking


def test_the_clients_own_parser_reads_the_answer(client: openai.OpenAI) -> None:
    for seed in range(2):
        answer = client.chat.completions.parse(**HOW, response_format=Seen, temperature=1.0, seed=seed).choices[0]
        assert isinstance(answer.message.parsed, Seen) and answer.finish_reason == "stop"


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": FORMAT},
        {"extra_body": {"guided_json": json.dumps(SCHEMA)}},
    ],
)
def test_a_schema_gives_what_the_pipeline_gives_whole_and_as_a_stream(small: Mini, client: openai.OpenAI, form: dict[str, Any]) -> None:
    wanted = Pipeline(small, compression("uniform:8"))([], "What is it?", schema=SCHEMA, max_tokens=60, temperature=0.7, seed=3)
    whole = client.chat.completions.create(**HOW, **form, temperature=0.7, seed=3).choices[0]
    assert whole.message.content == wanted and whole.finish_reason == "stop"
    Seen.model_validate_json(wanted)
    pieces = client.chat.completions.create(**HOW, **form, temperature=0.7, seed=3, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == wanted


def test_other_forms_and_none_are_answered_together(client: openai.OpenAI) -> None:
    asked: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"structured_outputs": {"regex": r"\d{3}-\d{2}"}}},
        {"extra_body": {"guided_regex": r"\d{3}-\d{2}"}},
        {"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}},
        {"extra_body": {"guided_choice": ["yes", "no"]}},
        {"extra_body": {"structured_outputs": {"json_object": True}}},
        {"response_format": {"type": "text"}},
        {},
    ]

    def answered(number: int) -> ChatCompletion:
        answer: ChatCompletion = client.chat.completions.create(**HOW, **asked[number], temperature=0.9, seed=number)
        return answer

    with ThreadPoolExecutor(8) as pool:
        texts = [answer.choices[0].message.content or "" for answer in pool.map(answered, range(len(asked)))]
    assert texts[0].startswith("{") and texts[5].startswith("{")
    assert all(re.fullmatch(r"\d{3}-\d{2}", text) for text in texts[1:3]) and set(texts[3:5]) <= {"yes", "no"}
    assert not any(text.startswith("{") for text in texts[6:])


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
        ({"guided_regex": r"\s+"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"guided_choice": ["a"], "structured_outputs": {"regex": "a"}}, "guided_choice"),
    ],
)
def test_a_form_that_cannot_be_followed_is_told_by_its_field(client: openai.OpenAI, form: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**HOW, extra_body=form)
    assert refused.value.param == param


def test_cs_12_a_form_that_becomes_too_costly_is_400_and_the_next_is_answered(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="regex"):
        client.chat.completions.create(**HOW, extra_body={"guided_regex": r"(.*\w.{30}){4}"})
    answer = client.chat.completions.create(**HOW, extra_body={"guided_choice": ["yes", "no"]})
    assert answer.choices[0].message.content in ("yes", "no")
