"""Answers in a form: JSON of a schema, what a regular expression matches, or one of several choices, by llguidance (mmsdk[structured]).

    guide = guide_of(Constraint.of(choice=["red", "green"]), tokenizer, stop_ids, v)
    token = masked(logits, [guide]).argmax(-1)
    guide.push(token)

At every token the grammar tells which may come next (a context-free grammar over lexemes, followed through a trie of the vocabulary), and
the scores of all others become -inf before one is taken: greedy and drawn answers alike can be nothing else. An end-of-text id is let
through only where the grammar accepts, and where nothing can follow the answer is over. In front of it one space may stand, which models
like to begin with and which is no part of an answer. JSON is written in one line, as `json.dumps` writes it, so that no model can go on
and on with white space. What a form may cost is bounded, a JSON schema's in a process of its own: see `mmsdk.generate.sealed`.

Letters: b rows, v words of the vocabulary.
"""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, Literal, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from mmsdk.errors import InputError, MmsdkError, ModelError
from mmsdk.generate.forks import COSTLY, LIMITS, LOST, LostError, Vocabulary
from mmsdk.generate.sealed import POSSIBLE, Form, checked
from mmsdk.vision.values import shown

__all__ = ["ANY", "COSTLY", "FREE", "Constraint", "Free", "Guide", "Guided", "LostError", "Schema", "Written", "guide_of", "masked"]


@runtime_checkable
class Modelled(Protocol):
    """What writes its own JSON Schema, as classes of Pydantic do."""

    def model_json_schema(self) -> Mapping[str, Any]:
        """The schema of an object."""
        ...


Schema = Mapping[str, object] | str | Modelled
"""A JSON Schema as an object, as its text, or a class of Pydantic's."""

_WORD = 32
# Characters of a grammar: what compiling costs grows with them, and the library bounds the rest; this many take less than a second.
_LONGEST = 2**18
_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# An answer is given without the white space before it (Python's, of which Rust's \s is a part), so none may belong to it.
_BEGUN = r"/([^\s\x1c-\x1f](?s:.)*)?/"
_NOTHING = "nothing matches it: no answer has this form"
_NO_SPACE, _SPACE = "start: body\n", 'start: " "? body\n'


@runtime_checkable
class Written(Hashable, Protocol):
    """A tokenizer that can be written down, in the format of `tokenizer.json`."""

    def to_json(self) -> str:
        """All of its vocabulary and rules."""
        ...


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer is to be: anything, or what a grammar accepts. Made by `of`; `kind` names the setting that it comes from."""

    kind: Literal["any", "schema", "regex", "choice"] = "any"
    grammar: str = ""

    @staticmethod
    def of(schema: Schema | None = None, regex: str | None = None, choice: Sequence[str] | None = None) -> "Constraint":
        """The constraint of a JSON schema (an object, its text, or a class of Pydantic's), a regular expression, or a list of choices.

        Of none of them, anything goes. A regular expression is in the syntax of Rust's, matches the whole answer, and has no look-around
        and no back-references; its classes (`\\w`, `\\d`, `\\s`) are Unicode's. Of JSON Schema, what the library does not follow is
        refused, never ignored.
        Raises InputError, naming the setting, for more than one of them and for what cannot be followed, ModelError without the library.
        """
        given = {name: value for name, value in (("schema", schema), ("regex", regex), ("choice", choice)) if value is not None}
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} were given together; an answer has one form", item=" ".join(given))
        if schema is not None:
            return _valid("schema", f"body: %json {_one_line(schema)}")
        if regex is not None:
            return _valid("regex", _matching(regex))
        if choice is not None:
            return _valid("choice", f"body: {' | '.join(json.dumps(text, ensure_ascii=False) for text in _choices(choice))}")
        return ANY


@runtime_checkable
class Guide(Protocol):
    """Where one answer stands in what it may be: `Free`, or `Guided` by a grammar."""

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""
        ...

    @property
    def problem(self) -> MmsdkError | None:
        """Why the answer cannot go on, where it cannot."""
        ...

    def push(self, token: int) -> None:
        """Go on by a token that was let through."""
        ...

    def fork(self) -> "Guide":
        """Another one that goes on from here by itself."""
        ...


@dataclass(frozen=True, slots=True)
class Free:
    """An answer that may be anything."""

    complete: bool = False
    problem: MmsdkError | None = None

    def push(self, token: int) -> None:
        """Nothing changes."""

    def fork(self) -> "Free":
        """The same: it stands nowhere."""
        return self


class Guided:
    """An answer that a grammar leads, from its beginning."""

    __slots__ = ("_kind", "_matcher")

    def __init__(self, kind: str, matcher: Any) -> None:
        self._kind = kind
        self._matcher = matcher

    def fill(self, row: Int32[Tensor, " w"]) -> None:
        """Write which tokens may come next, a bit each, least significant first. The row is on the processor."""
        self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())

    def push(self, token: int) -> None:
        """Go on by a token that was let through."""
        self._matcher.consume_token(token)

    def fork(self) -> "Guided":
        """Another one that goes on from here by itself."""
        return Guided(self._kind, self._matcher.deep_copy())

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped()) and self.problem is None

    @property
    def problem(self) -> MmsdkError | None:
        """What was wrong with the grammar where it could not be followed further: mostly that there were too many ways to go on.

        A LostError where nothing was: its process ended.
        """
        if not self._matcher.is_error():
            return None
        told = self._matcher.get_error()
        return LostError(told) if told.startswith(LOST) else InputError(_reason(told), item=self._kind)


ANY = Constraint()
FREE = Free()


def guide_of(constraint: Constraint, tokenizer: Written, stop_ids: frozenset[int], v: int, tenant: str = "") -> Guide:
    """A guide at the beginning of an answer, for scores of `v` words.

    What was compiled before is copied, of no other `tenant`: how long it takes tells nobody what others have asked.

    Raises InputError, naming the setting, where no answer meets the constraint or following it would cost too much, and LostError where
    the process for it ended by no fault of its own.
    """
    if constraint.kind == "any":
        return FREE
    try:
        return Guided(constraint.kind, _compiled(constraint, tokenizer, stop_ids, v, tenant).deep_copy())
    except InputError:
        raise
    except (RuntimeError, ValueError) as error:
        # what the library did not foresee is the fault of this one form, and ends this one request
        raise InputError(f"it cannot be compiled: {error}", item=constraint.kind) from error


def masked(logits: Float[Tensor, "b v"], guides: Sequence[Guide]) -> Float[Tensor, "b v"]:
    """The scores, with -inf for every token that the guide of its row does not let through; where all are free, the scores themselves."""
    led = [(place, guide) for place, guide in enumerate(guides) if isinstance(guide, Guided)]
    if not led:
        return logits
    v = logits.shape[-1]
    masks = torch.full((len(guides), -(-v // _WORD)), -1, dtype=torch.int32)
    for place, guide in led:
        guide.fill(masks[place])
    masks = masks.to(logits.device)
    bits = masks[:, :, None] >> torch.arange(_WORD, dtype=torch.int32, device=masks.device)
    return logits.masked_fill((bits & 1).flatten(1)[:, :v] == 0, -torch.inf)


def _library() -> ModuleType:
    # here and not above: without mmsdk[structured] this module is imported and not used
    try:
        import llguidance
    except ModuleNotFoundError:
        raise ModelError("answers in a form need the package llguidance: pip install '.[structured]' in the clone") from None
    return llguidance


def _valid(kind: Literal["schema", "regex", "choice"], grammar: str) -> Constraint:
    _check_length(grammar, kind)
    library = _library()
    if kind == "schema" and POSSIBLE:
        wrong = checked(_NO_SPACE + grammar)
    else:
        wrong = library.LLMatcher.validate_grammar(_NO_SPACE + grammar, limits=library.LLParserLimits(**LIMITS))
    if wrong and not wrong.startswith("WARNING"):
        raise InputError(_reason(wrong), item=kind)
    return Constraint(kind, grammar)


def _one_line(schema: Schema) -> str:
    try:
        told = _of_model(schema) if isinstance(schema, Modelled) else schema
        value = json.loads(told) if isinstance(told, str) else told
        if not isinstance(value, Mapping):
            raise InputError(
                f"it is {shown(value)}, expected an object, such as {{'type': 'object'}}, or a class of Pydantic's", item="schema"
            )
        # written whole, so that what is no JSON is told here
        return _written(json.dumps({**value, "x-guidance": _LINE}, ensure_ascii=False, allow_nan=False), "schema")
    except (TypeError, ValueError, RecursionError) as error:
        raise error if isinstance(error, InputError) else InputError(f"it is no JSON: {error}", item="schema") from None


def _of_model(model: Modelled) -> Mapping[str, Any]:
    try:
        return _closed(model.model_json_schema())
    except Exception as error:
        # the class's own code, and Pydantic's for a field that JSON Schema has no words for
        raise InputError(f"{shown(model)} does not give its schema: {error}", item="schema") from error


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A class's schema whose objects have the fields of their class and no others, but where it says what else they may have."""
    told: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            told[key] = {name: _closed(one) if isinstance(one, Mapping) else one for name, one in value.items()}
        elif key in ("default", "examples", "const", "enum", "allOf", "if", "then", "else", "not"):
            # values, and conditions that hold of one object together, each of which knows some of its fields
            told[key] = value
        elif isinstance(value, Mapping):
            told[key] = _closed(value)
        elif isinstance(value, list):
            told[key] = [_closed(one) if isinstance(one, Mapping) else one for one in value]
        else:
            told[key] = value
    if told.get("type") == "object" and "properties" in told:
        told.setdefault("additionalProperties", False)
    return told


def _matching(regex: object) -> str:
    if not isinstance(regex, str):
        raise InputError(f"it is {shown(regex)}, expected a regular expression as a string", item="regex")
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise InputError("it ends in a single backslash; write two for one", item="regex")
    return f"body: TEXT\nTEXT: /{_library().regex_to_lark(_written(regex, 'regex'), '')}/ & {_BEGUN}"


def _choices(choice: object) -> Sequence[str]:
    if not isinstance(choice, list | tuple) or not choice or not all(isinstance(text, str) for text in choice):
        raise InputError(f'it is {shown(choice)}, expected a list of strings, such as ["yes", "no"]', item="choice")
    texts = cast(Sequence[str], choice)
    for text in texts:
        if not text or text[0].isspace():
            raise InputError(f"{shown(text)} is empty or begins with white space, which no answer does", item="choice")
    return [_written(text, "choice") for text in texts]


def _written(text: str, kind: str) -> str:
    """The text, if it can be written: half a surrogate pair cannot."""
    _check_length(text, kind)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"it is no Unicode: {error}", item=kind) from None
    return text


def _check_length(text: str, kind: str) -> None:
    if len(text) > _LONGEST:
        raise InputError(f"it takes {len(text):,} characters, at most {_LONGEST:,} are followed", item=kind)


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Written, stop_ids: frozenset[int], v: int) -> Vocabulary:
    return Vocabulary(tokenizer.to_json(), v, tuple(sorted(stop_ids)))


@lru_cache(maxsize=4)
def _words(vocabulary: Vocabulary) -> Any:
    """The vocabulary as the library wants it, a quarter of a second's work."""
    try:
        return _library().LLTokenizer(vocabulary.text, n_vocab=vocabulary.v, eos_token=list(vocabulary.ends))
    except ValueError as error:
        raise ModelError(f"answers in a form cannot be had of this model, whose vocabulary llguidance does not read: {error}") from None


@lru_cache(maxsize=32)
def _compiled(constraint: Constraint, tokenizer: Written, stop_ids: frozenset[int], v: int, tenant: str) -> Any:
    """A matcher at its beginning, to be copied for every answer of a tenant's."""
    # without the space, or it would be found out behind it only that nothing is accepted
    bare, spaced = _NO_SPACE + constraint.grammar, _SPACE + constraint.grammar
    vocabulary = _vocabulary(tokenizer, stop_ids, v)
    if constraint.kind == "schema" and POSSIBLE:
        form = Form(bare, spaced, vocabulary)
        if form.told:
            raise InputError(_reason(form.told), item=constraint.kind)
        return form
    library, words = _library(), _words(vocabulary)
    limits = library.LLParserLimits(**LIMITS)
    tried = library.LLMatcher(words, bare, log_level=0, limits=limits)
    tried.compute_bitmask()
    if tried.is_error():
        raise InputError(_reason(tried.get_error()), item=constraint.kind)
    return library.LLMatcher(words, spaced, log_level=0, limits=limits)


def _reason(told: str) -> str:
    """What the library says is wrong, without where in the grammar that is."""
    lines = told.splitlines() or [""]
    inner = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    first = lines[0].removeprefix("WARNING: ").strip()
    if first.startswith("at ") and "): " in first:
        first = first.partition("): ")[2]
    told = (inner or [first.removeprefix("failed to compile JSON schema: ")])[0]
    return _NOTHING if not told or told.startswith("NoExtension") else told
