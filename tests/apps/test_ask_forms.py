"""`mmsdk ask` for answers in a form: mini as it ships says only what may be said."""

import json
import re
from pathlib import Path

import pytest

from mmsdk.apps.cli import main
from mmsdk.weights.bundle import Bundle

SCENE = str(Path(__file__).parents[2] / "apps" / "media" / "scene.png")


def test_mini_says_one_of_the_choices_and_what_a_schema_and_a_regular_expression_want(
    mini_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", SCENE, "What is the colour of the sky?", "--choice", "a tractor, blue, 7 feet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] in {"a tractor", "blue", "7 feet"}
    schema = {
        "type": "object",
        "properties": {
            "things": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
            "indoors": {"type": "boolean"},
        },
        "required": ["things", "indoors"],
        "additionalProperties": False,
    }
    (tmp_path / "form.json").write_text(json.dumps(schema), encoding="utf-8")
    assert main(["ask", SCENE, "What is there?", "--schema", str(tmp_path / "form.json"), "--max-tokens", "100", "--json"]) == 0
    said = json.loads(json.loads(capsys.readouterr().out)["text"])
    assert list(said) == ["things", "indoors"] and type(said["indoors"]) is bool
    assert len(said["things"]) <= 3 and all(isinstance(thing, str) and len(thing) <= 12 for thing in said["things"])
    # as a stream
    assert main(["ask", SCENE, "How many things are there?", "--regex", r"\d\d? things"]) == 0
    assert re.fullmatch(r"\d\d? things\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--schema", "missing.json"], "missing.json: the schema cannot be read"),
        (["--schema", SCENE], "the schema cannot be read"),
        (["--regex", "("], "regex: unclosed group"),
        (["--choice", "a,,b"], "choice: '' is empty"),
        (["--choice", "a", "--regex", "a"], "regex and choice were given together"),
    ],
)
def test_forms_that_cannot_be_are_told_before_a_model_is_loaded(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", SCENE, "What?", "--model", "no such model", *words, "--json"]) == 2
    assert told in json.loads(capsys.readouterr().out)["error"]["message"]
