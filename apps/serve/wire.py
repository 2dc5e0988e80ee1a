"""Requests for chat completions as they stand in a body, read strictly: what is not understood is refused by name, never ignored."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, from_json

from mmsdk.apps.serve.refusal import RefusedError
from mmsdk.plugins import near
from mmsdk.vision.values import shown

__all__ = [
    "Address",
    "ChatRequest",
    "ImagePart",
    "JSONSchema",
    "Message",
    "Part",
    "ResponseFormat",
    "StructuredOutputs",
    "TextPart",
    "VideoPart",
    "parsed",
]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TextPart(_Strict):
    """Words."""

    type: Literal["text"]
    text: str


class Address(_Strict):
    """A data: URI, or an http(s) address of a host that the server lets media come from. `detail` makes no difference."""

    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(_Strict):
    """A picture."""

    type: Literal["image_url"]
    image_url: Address


class VideoPart(_Strict):
    """A clip."""

    type: Literal["video_url"]
    video_url: Address


Part = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]


class Message(_Strict):
    """One turn. Answers may be sent back as clients keep them, with fields that hold nothing."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None


class StreamOptions(_Strict):
    """Whether the last chunk of a stream says what it took."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class JSONSchema(_Strict):
    """A schema with its name. It is always followed, `strict` or not."""

    name: str
    description: str | None = None
    form: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """What the whole answer is to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class StructuredOutputs(_Strict):
    """The same as vLLM's clients say it: one of these."""

    form: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None


class ChatRequest(_Strict):
    """The fields that make a difference, beyond OpenAI's `top_k`, `min_p`, `repetition_penalty` and those of vLLM's that say what the
    answer is to be; and those that tell who asks, which make none.
    """

    model: str
    messages: list[Message] = Field(min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


PARTS = 8192  # of a request, its messages among them: each is looked at several times, and an empty one takes no token

# What OpenAI's API has and this server does not: taken where it asks for nothing, refused where it asks for something.
ABSENT: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "logit_bias": ({},),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (False, True),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": (),
        "web_search_options": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
    }
)


# What pydantic finds wrong, by its own names for that, and what we say of it.
_PLAIN: Mapping[str, str] = MappingProxyType(
    {
        "missing": "it is missing",
        "too_short": "it is empty; at least one is expected",
        "union_tag_invalid": "nothing of the type {tag!r} is taken here; there are {expected_tags}",
        "union_tag_not_found": "it does not say of which type it is; there are 'text', 'image_url', 'video_url'",
        "none_required": "it is not supported; leave it out",
        "string_unicode": "it is no Unicode",
    }
)
_WANTED: Mapping[str, str] = MappingProxyType(
    {
        "literal_error": "{expected}",
        "string_type": "a string",
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "list_type": "a list",
        "dict_type": "an object",
        "model_type": "an object",
        "model_attributes_type": "an object",
    }
)


def parsed(body: bytes) -> ChatRequest:
    """The request in a body. Raises RefusedError, naming the item, for no JSON, another shape, or what is not supported."""
    try:
        value = from_json(body)
    except ValueError as error:
        raise RefusedError(400, f"the body is no JSON: {error}", "invalid_json") from None
    if not isinstance(value, dict):
        raise RefusedError(400, f"the body is {_kind(value)}, expected an object with model and messages", "invalid_type")
    _check_parts(value.get("messages"))
    for name in ABSENT.keys() & value.keys():
        _check_asks_nothing(name, value[name])
    try:
        return ChatRequest.model_validate({name: part for name, part in value.items() if name not in ABSENT})
    except ValidationError as error:
        # of a union each kind tells what it lacks: the one that was got furthest into is the one that was meant
        errors = error.errors(include_url=False)
        first = max(errors, key=lambda one: len(one["loc"]))
        place = _place(first["loc"], value)
        same = [one for one in errors if len(one["loc"]) == len(first["loc"]) and _place(one["loc"], value) == place]
        raise RefusedError(400, f"{place}: {_told(first, same)}", first["type"], place) from None


def _check_parts(messages: object) -> None:
    """Before each of them is looked at: a body has room for a million."""
    if not isinstance(messages, list):
        return
    contents = [one["content"] for one in messages if isinstance(one, dict) and isinstance(one.get("content"), list)]
    count = len(messages) + sum(map(len, contents))
    if count > PARTS:
        told = f"{len(messages):,} messages of {count - len(messages):,} parts, but at most {PARTS:,} go into a request, counted together"
        raise RefusedError(400, told, "context_length_exceeded", "messages")


def _told(first: ErrorDetails, same: Sequence[ErrorDetails]) -> str:
    """What is wrong at a place, in our words; `same` are all kinds of value that might have stood there and do not."""
    if first["type"] == "extra_forbidden":
        return _unknown(first["loc"])
    if first["type"] in _PLAIN:
        return _PLAIN[first["type"]].format(**first.get("ctx", {}))
    wanted = [_WANTED[one["type"]].format(**one.get("ctx", {})) for one in same if one["type"] in _WANTED]
    # whatever else pydantic finds, it says in its own words
    return f"it is {shown(first['input'])}, expected {' or '.join(dict.fromkeys(wanted))}" if wanted else first["msg"]


def _unknown(steps: Sequence[int | str]) -> str:
    """What is said of a field that is not known; of the request's own, with what is near."""
    close = near(str(steps[0]), [*ChatRequest.model_fields, *ABSENT]) if len(steps) == 1 else ""
    return f"there is no such field; {close or 'leave it out'}".strip()


def _check_asks_nothing(name: str, value: object) -> None:
    if value is None or value in ABSENT[name]:
        return
    neutral = " or ".join(repr(one) for one in ABSENT[name])
    raise RefusedError(
        400, f"{name} is not supported; leave it out{f', or say {neutral}' if neutral else ''}", "unsupported_parameter", name
    )


def _place(steps: Sequence[int | str], value: Any) -> str:
    """Where in the body that is: the steps without those that name a kind and no place."""
    path = ""
    for number, step in enumerate(steps):
        if isinstance(step, int) and isinstance(value, list):
            path, value = f"{path}[{step}]", value[step] if step < len(value) else None
        elif isinstance(value, dict) and (step in value or number == len(steps) - 1):
            path, value = f"{path}.{step}" if path else str(step), value.get(step)
    return path


def _kind(value: object) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
