"""`mmsdk serve` asked for answers in a form: by OpenAI's own client as it does, and with the fields of vLLM's."""

import base64
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ConfigDict, Field

from mmsdk.apps.serve.server import serving
from mmsdk.apps.serve.service import Service
from mmsdk.apps.serve.settings import Settings
from mmsdk.compress import compression
from mmsdk.generate.constrain import LostError
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


def test_all_settings_at_once_among_others_are_the_pipelines(small: Mini, client: openai.OpenAI) -> None:
    """PB-13, PB-14: several answers, a form, stop strings, penalties, seeds and log-probabilities, of what compression leaves;
    four requests at one time, whole and as streams."""
    scene = (Path(__file__).parents[2] / "apps" / "media" / "scene.png").read_bytes()
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(scene).decode()}"}}
    how: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "stop": ["9", "🙂"], "presence_penalty": 0.4, "frequency_penalty": 0.3}
    regex, more, pipe = r"[a-z]{2,9} 🙃 [0-9]{1,4}!", {"repetition_penalty": 1.2, "top_k": 40}, Pipeline(small, compression("uniform:8"))

    def asked(seed: int) -> list[tuple[str, int, str]]:
        said: Any = [{"role": "user", "content": [shown, {"type": "text", "text": f"Question {seed}?"}]}]
        given: dict[str, Any] = {**how, "seed": seed, "n": 2, "logprobs": True, "top_logprobs": 2, "max_tokens": 40}
        call: Any = client.chat.completions.create
        answer = call(model="small", messages=said, extra_body={"guided_regex": regex, **more}, stream=seed % 2 == 1, **given)
        if seed % 2 == 0:
            return [(one.message.content or "", len(one.logprobs.content), one.finish_reason) for one in answer.choices]
        texts, counts, ends = ["", ""], [0, 0], ["", ""]
        for choice in (choice for chunk in answer for choice in chunk.choices):
            texts[choice.index] += choice.delta.content or ""
            counts[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
            ends[choice.index] = choice.finish_reason or ends[choice.index]
        return list(zip(texts, counts, ends, strict=True))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(asked, range(4)))
    for seed, answers in enumerate(found):
        wanted = pipe([scene], f"Question {seed}?", n=2, seed=seed, regex=regex, logprobs=2, max_tokens=40, **how, **more)
        assert answers == [(str(one), len(one.logprobs), one.finish) for one in wanted]
    assert any("🙃" in text for answers in found for text, _, _ in answers)


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
    """By the name of the field that asked for it, which the engine does not know."""
    costly = r"(.*\w.{30}){4}"
    for form, param in (
        ({"guided_regex": costly}, "guided_regex"),
        ({"structured_outputs": {"regex": costly}}, "structured_outputs.regex"),
    ):
        with pytest.raises(openai.BadRequestError, match=f"{param}: ") as refused:
            client.chat.completions.create(**HOW, extra_body=form)
        assert refused.value.param == param
    with pytest.raises(openai.APIError, match="guided_regex: ") as ended:
        list(client.chat.completions.create(**HOW, extra_body={"guided_regex": costly}, stream=True, temperature=1.0, seed=0))
    assert ended.value.param == "guided_regex"
    answer = client.chat.completions.create(**HOW, extra_body={"guided_choice": ["yes", "no"]})
    assert answer.choices[0].message.content in ("yes", "no")


def test_cs_12_schemas_that_would_compile_for_ever_leave_the_threads_to_others(client: openai.OpenAI) -> None:
    """More of them than there are threads; the errors are theirs, and the next form is answered."""
    costly = {"allOf": [{"type": "string", "pattern": f"^.*a.{{{number}}}$"} for number in range(1, 40)]}

    def refused(field: str) -> openai.BadRequestError:
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(**HOW, extra_body={field: costly} if field == "guided_json" else {field: {"json": costly}})
        return error.value

    with ThreadPoolExecutor(3) as pool:
        errors = list(pool.map(refused, ["guided_json", "structured_outputs", "guided_json"]))
    assert [error.param for error in errors] == ["guided_json", "structured_outputs.json", "guided_json"]
    assert all(error.code == "form_too_costly" for error in errors)
    answer = client.chat.completions.create(**HOW, extra_body={"guided_json": {"enum": ["yes", "no"]}})
    assert answer.choices[0].message.content in ('"yes"', '"no"')


def test_a_form_whose_process_was_lost_is_no_fault_of_the_clients(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """503, and the request comes again: while the form is made, and amid the answer."""

    def lost(*_: Any) -> Any:
        raise LostError("it was lost; ask again")

    for place, broken in (
        ("mmsdk.apps.serve.form.guide_of", lost),
        ("mmsdk.generate.constrain.Guided.problem", property(lambda _: LostError("it was lost; ask again"))),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, broken)
            with pytest.raises(openai.InternalServerError, match="it was lost") as refused:
                client.chat.completions.create(**HOW, extra_body={"guided_json": {"enum": ["yes", "no"]}})
        assert refused.value.status_code == 503 and refused.value.code == "unavailable"
        assert refused.value.response.headers["retry-after"] == "1"
