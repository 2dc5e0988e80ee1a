"""Public functions that take settings by name: who misspells one, leaves one out, or writes another library's, is told what was meant."""

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import Parameter, Signature, signature
from types import MappingProxyType
from typing import ParamSpec, TypeVar

from mmsdk.errors import InputError
from mmsdk.plugins import near

__all__ = ["door", "doors"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


# What transformers calls by another name, or does otherwise: the setting that takes its place here, and how that is written.
_ELSEWHERE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "do_sample": ("temperature", "temperature=0 is greedy, and above 0 it draws"),
        "max_length": ("max_tokens", "max_tokens counts the tokens of the answer"),
        "max_new_tokens": ("max_tokens", "it is called max_tokens"),
        "min_length": ("max_tokens", "there is no least length; max_tokens is the most"),
        "num_return_sequences": ("n", "it is called n"),
        "stop_strings": ("stop", "it is called stop"),
        "eos_token_id": ("stop", 'answers end at the model\'s own id, and before the strings of stop=("\\n",)'),
        "generator": ("seed", "seed=1 draws the same numbers each time"),
        "streamer": ("temperature", "pipe.stream(media, question) gives the answer in pieces"),
        "generation_config": ("temperature", "write its settings one by one: pipe(media, question, temperature=0.7)"),
        "generate_kwargs": ("temperature", "write the settings themselves: pipe(media, question, temperature=0.7)"),
        "adapter_name": ("name", "it is called name"),
    }
)

_SHOWN = ("image", "images", "video", "videos", "text", "prompt", "messages", "inputs", "input_ids", "pixel_values")
"""What transformers is shown, and asked."""

_ASKED = ("max_tokens", "max_new_tokens", "temperature", "do_sample", "top_k", "top_p", "min_p", "seed", "stop", "num_beams", "n", "choice")
"""What a question is asked with, and no model opened."""

_FORMS = ("schema", "regex", "choice")
_CONFIGURED = (
    *_FORMS, "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "max_time", "logprobs", "num_beams", "length_penalty", "early_stopping",
)  # fmt: skip
"""What a conversation takes in one piece, as its settings."""

# Of the whole pipeline, and of no single question: what it is called here.
_OPENED: Mapping[str, str] = MappingProxyType(
    {name: name for name in ("kv", "quantize", "dtype", "device", "batch_size", "gguf_file", "model", "task")}
    | {"torch_dtype": "dtype", "device_map": "device", "quantization_config": "quantize", "load_in_8bit": "quantize"}
    | {"load_in_4bit": "quantize", "cache_implementation": "kv", "past_key_values": "kv", "use_cache": "kv"}
)


def door(function: Callable[P, R]) -> Callable[P, R]:
    """The same function. Called with a name that it does not take, without one that it needs, or with too much, it raises InputError, where
    Python's own error would be a TypeError."""
    form = signature(function)
    known = [one.name for one in form.parameters.values() if one.kind is not Parameter.POSITIONAL_ONLY]
    known = [name for name in known if name != "self"]

    @wraps(function)
    def checked(*given: P.args, **settings: P.kwargs) -> R:
        _check(settings, known)
        try:
            return function(*given, **settings)
        except TypeError as error:
            # one from within is another matter
            told = _unfit(form, function.__name__, given, settings)
            if told is None:
                raise
            raise told from error

    return checked


def doors(kind: type[T]) -> type[T]:
    """The same dataclass, of whose fields this holds when it is made."""
    # a method is not assigned to, as type checkers see it
    setattr(kind, "__init__", door(kind.__init__))  # noqa: B010
    return kind


def _check(given: Iterable[str], known: list[str]) -> None:
    for name in given:
        if name not in known:
            hint = _hint(name, known) or near(name, known)
            raise InputError(f"there is no such setting; {hint}there is {', '.join(known) or 'none'}", item=name)


def _hint(name: str, known: list[str]) -> str:
    """Another way to what this name does elsewhere, at this door; "" where there is none."""
    if name in _ELSEWHERE and _ELSEWHERE[name][0] in known:
        return f"{_ELSEWHERE[name][1]}; "
    if name == "n" and known[:2] == ["media", "question"]:
        return 'a stream answers one question, once: pipe("photo.jpg", "What is it?", n=2) gives several answers, as a list; '
    ours = _ELSEWHERE[name][0] if name in _ELSEWHERE else name
    if "config" in known and ours in _CONFIGURED:
        form = f"constraint=Constraint.of({ours}=...)" if ours in _FORMS else f"{ours}=..."
        return f"it goes into the settings: config=GenerationConfig({form}); "
    if name in _SHOWN and "question" in known:
        return 'what is shown and asked comes first, without names: ("photo.jpg", "What is it?"); '
    if name in _ASKED and "task" in known:
        return "it goes with each question: pipe(media, question, temperature=0.7, max_tokens=32); "
    if name in _OPENED and _OPENED[name] not in known:
        return f"the model is opened with it: mmsdk.pipeline({_OPENED[name]}=...); "
    if name in _OPENED and name != _OPENED[name]:
        return f"it is called {_OPENED[name]}; "
    return ""


def _unfit(form: Signature, called: str, given: tuple[object, ...], settings: Mapping[str, object]) -> InputError | None:
    """What is missing, or too much, of a call; None where nothing is."""
    try:
        form.bind(*given, **settings)
        return None
    except TypeError as error:
        told = str(error)
    takes = [one.name for one in form.parameters.values() if one.name != "self"]
    known = f"there is {', '.join(takes) or 'none'}"
    try:
        there = form.bind_partial(*given, **settings).arguments
    except TypeError:
        # more than there are places for, or a name whose place is taken
        where = "" if called == "__call__" or called == "__init__" else called
        return InputError(f"{told}; {known}", item=where)
    missing = [one.name for one in form.parameters.values() if one.default is Parameter.empty and one.name not in there]
    return InputError(f"it is missing; {known}", item=missing[0])
