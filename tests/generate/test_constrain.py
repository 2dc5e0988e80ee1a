"""Answers in a form, drawn from noise: what comes out is checked by Python's json and re, and by a slow reading of the schema's words."""

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers

from mmsdk.errors import InputError, ModelError
from mmsdk.generate import constrain
from mmsdk.generate.constrain import ANY, FREE, Constraint, Guide, Guided, guide_of, masked
from mmsdk.models.mini.family import Mini
from mmsdk.tokenizer import TextTokenizer

V, END = 49152, 2
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tall": {"type": "boolean"},
        "hands": {"type": "array", "items": {"enum": ["left", "right"]}, "minItems": 1, "maxItems": 2},
        "boss": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/boss"}]},
    },
    "required": ["name", "age", "hands", "boss"],
    "additionalProperties": False,
    "$defs": {"boss": {"type": "object", "properties": {"id": {"const": 7}}, "required": ["id"], "additionalProperties": False}},
}
KINDS = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None)}


def holds(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether JSON Schema's words in `PERSON` are true of a value, each read as the standard has it."""
    if "$ref" in schema:
        return holds(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    if "anyOf" in schema:
        return any(holds(value, one, root) for one in schema["anyOf"])
    for word in ("const", "enum"):
        if word in schema:
            return value in (schema[word] if word == "enum" else [schema[word]])
    if not isinstance(value, KINDS[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean"):
        return False
    if isinstance(value, str):
        return len(value) <= schema["maxLength"]
    if isinstance(value, list):
        return schema["minItems"] <= len(value) <= schema["maxItems"] and all(holds(one, schema["items"], root) for one in value)
    if isinstance(value, dict):
        named = schema["properties"]
        return set(schema["required"]) <= set(value) <= set(named) and all(holds(part, named[name], root) for name, part in value.items())
    return "minimum" not in schema or schema["minimum"] <= value <= schema["maximum"]


def said(guide: Guide, tokenizer: TextTokenizer, seed: int, most: int = 200, width: int = V) -> str:
    """An answer drawn from noise, to its end."""
    generator, ids = torch.Generator().manual_seed(seed), list[int]()
    for _ in range(most):
        token = int(masked(torch.randn(1, width, generator=generator), [guide]).argmax())
        if token == END:
            return tokenizer.decode(ids).lstrip()
        ids.append(token)
        guide.push(token)
        assert guide.problem is None
        if guide.complete:
            return tokenizer.decode(ids).lstrip()
    raise AssertionError(f"no end after {most} tokens: {tokenizer.decode(ids)!r}")


@pytest.fixture(scope="module")
def words(small: Mini) -> TextTokenizer:
    assert isinstance(small.tokenizer, TextTokenizer)
    return small.tokenizer


def led(words: TextTokenizer, constraint: Constraint, width: int = V) -> Guided:
    guide = guide_of(constraint, words, frozenset({END}), width)
    assert isinstance(guide, Guided)
    return guide


def allowed(guide: Guide, width: int = V) -> set[int]:
    return set(masked(torch.zeros(1, width), [guide])[0].isfinite().nonzero()[:, 0].tolist())


def test_json_of_a_schema_parses_and_is_what_the_schema_says(words: TextTokenizer) -> None:
    for schema in (PERSON, json.dumps(PERSON)):
        constraint = Constraint.of(schema=schema)
        for seed in range(5):
            text = said(led(words, constraint), words, seed)
            value = json.loads(text)
            assert holds(value, PERSON, PERSON), text
            # in one line, with the white space of json.dumps and no other
            assert re.sub(r'"[^"]*"', '""', text) == re.sub(r'"[^"]*"', '""', json.dumps(value))


@pytest.mark.parametrize(
    "regex",
    [
        r"\d{3}-\d{2}",
        r"^(yes|no), [a-z ]{2,12}\.$",
        r"(?i)ok!?",
        r"a/b\\\"c",
        r"\s*[0-9]{2}\s?",
        r"(?:#[0-9a-f]{6} ){1,3}end",
        r".{0,9}",
        r"é[ä-ü]🧿",
    ],
)
def test_an_answer_is_matched_whole_by_its_regular_expression(words: TextTokenizer, regex: str) -> None:
    for seed in range(6):
        text = said(led(words, Constraint.of(regex=regex)), words, seed)
        assert re.fullmatch(regex, text), text


def test_choices_are_said_as_they_are_and_no_other(words: TextTokenizer) -> None:
    choices = ["red", "red dog", "a\u0001b", 'q"\\', "tab\there", "猫 🧿", "%json {}", "/x/", "line\n"]
    found = {said(led(words, Constraint.of(choice=choices)), words, seed) for seed in range(60)}
    assert found <= set(choices) and len(found) > 5


def test_the_tokens_let_through_are_those_that_some_choice_goes_on_with(words: TextTokenizer) -> None:
    """Against every word of the vocabulary, one after the other; the end is let through where a choice is whole."""
    choices = ["red", "red dog", "green", "grün"]
    spelled = {token: words.decode([token]) for token in range(V)}
    special = {one.id for one in words.specials.values()}
    guide, text = led(words, Constraint.of(choice=choices)), ""
    for token in words.encode(" red dog"):
        wanted = {
            one
            for one, word in spelled.items()
            if word and one not in special and any(c.startswith(text + word) or f" {c}".startswith(text + word) for c in choices)
        }
        # half of "ü" is no text of its own
        half = {one for one in allowed(guide) if "\ufffd" in spelled[one]}
        assert allowed(guide) - half == wanted | ({END} if text.strip() in choices else set())
        text += spelled[token]
        guide.push(token)
    assert guide.complete and text == " red dog"


def test_rows_without_a_form_are_left_as_they_are(words: TextTokenizer) -> None:
    logits = torch.randn(3, V)
    assert masked(logits, [FREE, FREE, FREE]) is logits and guide_of(ANY, words, frozenset({END}), V) is FREE
    before = logits.clone()
    mixed = masked(logits, [FREE, led(words, Constraint.of(choice=["no"])), FREE])
    assert torch.equal(logits, before) and torch.equal(mixed[[0, 2]], before[[0, 2]])
    assert mixed[1].isfinite().sum() < 10 and torch.equal(mixed[1][mixed[1].isfinite()], before[1][mixed[1].isfinite()])


def test_scores_beyond_the_vocabulary_are_never_let_through(words: TextTokenizer) -> None:
    guide = led(words, Constraint.of(regex=".*"), V + 77)
    assert max(allowed(guide, V + 77)) < V and len(allowed(guide, V + 77)) > V - 500


def test_answers_do_not_share_a_place_in_the_grammar(words: TextTokenizer) -> None:
    constraint = Constraint.of(choice=["one two", "one six"])
    first, second = led(words, constraint), led(words, constraint)
    for token in words.encode("one"):
        first.push(token)
    assert allowed(first) != allowed(second) == allowed(led(words, constraint))


def test_a_vocabulary_of_sentencepiece_with_bytes_is_led_too() -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁yes", "▁no", "yes", "n", "o", "!", "▁▁"]
    backend = Tokenizer(models.BPE({piece: place for place, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<s>", "</s>"])
    tokenizer = TextTokenizer(backend)
    choices, v = ["yes", "no", "no yes!", "née"], len(pieces)
    found = {said(led(tokenizer, Constraint.of(choice=choices), v), tokenizer, seed, width=v) for seed in range(40)}
    assert found == set(choices)


@pytest.mark.parametrize(
    ("setting", "value", "told"),
    [
        ("schema", {"type": "strin"}, "Invalid type: strin"),
        ("schema", {"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ("schema", {"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
        ("schema", {"$ref": "#/$defs/x"}, "does not exist"),
        ("schema", {"$ref": "http://127.0.0.1/x"}, "not"),
        ("schema", "{", "no JSON"),
        ("schema", "[" * 100_000, "no JSON"),
        ("schema", "[1]", "expected an object"),
        ("schema", {"const": {1}}, "no JSON"),
        ("schema", {"const": float("nan")}, "no JSON"),
        ("schema", {"const": "\ud800"}, "no Unicode"),
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", "a\\", "single backslash"),
        ("regex", "\ud800", "no Unicode"),
        ("choice", [], "expected a list of strings"),
        ("choice", "yes", "expected a list of strings"),
        ("choice", ["yes", ""], "is empty"),
        ("choice", [" yes"], "begins with white space"),
    ],
)
def test_what_cannot_be_followed_is_told_by_its_name(setting: str, value: Any, told: str) -> None:
    with pytest.raises(InputError, match=re.escape(told)) as refused:
        Constraint.of(**{setting: value})
    assert refused.value.item == setting and "x-guidance" not in str(refused.value)


def test_two_forms_at_once_are_none() -> None:
    with pytest.raises(InputError, match="schema and choice were given together"):
        Constraint.of(schema={}, choice=["a"])


@pytest.mark.parametrize("regex", [r"\s+", r"[^\s\S]", "(?:a|b){1000000}", "(a?){3000}a{3000}"])
def test_what_nothing_meets_or_costs_too_much_is_an_error_before_the_first_token(words: TextTokenizer, regex: str) -> None:
    constraint = Constraint.of(regex=regex)
    nothing = regex.startswith(("\\s", "["))
    with pytest.raises(InputError, match="^regex: nothing matches it: no answer has this form$" if nothing else "^regex: .") as refused:
        guide_of(constraint, words, frozenset({END}), V)
    assert refused.value.item == "regex" and "\n" not in str(refused.value) and "NoExtension" not in str(refused.value)


def test_cs_12_a_form_that_becomes_too_costly_ends_its_row_alone(words: TextTokenizer) -> None:
    costly, other = led(words, Constraint.of(regex="(.*a.{25}){3}")), led(words, Constraint.of(regex="[a-z]{400}"))
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        ids = masked(torch.randn(2, V, generator=generator), [costly, other]).argmax(-1).tolist()
        assert ids[1] != END and other.problem is None
        if costly.problem is not None:
            break
        costly.push(ids[0])
        other.push(ids[1])
    assert costly.problem is not None and costly.problem.item == "regex" and not costly.complete


def test_a_vocabulary_that_the_library_does_not_read_is_told() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))
    with pytest.raises(ModelError, match="whose vocabulary"):
        guide_of(Constraint.of(choice=["b"]), TextTokenizer(backend), frozenset({1}), 2)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert Constraint.of() == ANY
    for asked in ({"schema": {}}, {"regex": "a"}, {"choice": ["a"]}):
        with pytest.raises(ModelError, match=r"pip install '\.\[structured\]' in the clone"):
            Constraint.of(**asked)  # type: ignore[arg-type]  # one of them each time


def test_a_form_that_is_too_long_is_told_before_it_is_compiled() -> None:
    for setting, value in (("regex", "a" * 300_000), ("choice", ["abc" * 20_000] * 5), ("schema", {"const": "a" * 300_000})):
        with pytest.raises(InputError, match="at most 262,144 are followed") as wrong:
            Constraint.of(**{setting: value})  # type: ignore[arg-type]  # one of them each time
        assert wrong.value.item == setting


def test_cs_07_what_a_tenant_had_compiled_is_no_faster_for_another(words: TextTokenizer) -> None:
    form, made = Constraint.of(choice=["once", "and never again"]), constrain._compiled.cache_info().misses
    counts = list[int]()
    for tenant in ("one", "one", "two"):
        guide_of(form, words, frozenset({END}), V, tenant)
        counts.append(constrain._compiled.cache_info().misses - made)
    assert counts == [1, 1, 2]


def test_settings_are_values() -> None:
    one, other = Constraint.of(choice=["a", "b"]), Constraint.of(choice=("a", "b"))
    assert one == other and hash(one) == hash(other) and one != Constraint.of(choice=["a"])
    order: Sequence[Constraint] = [Constraint.of(schema={"type": "object"}), Constraint.of(schema='{"type": "object"}')]
    assert order[0] == order[1]
