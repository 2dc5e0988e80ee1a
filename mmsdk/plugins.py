"""Methods by name: a folder of plugin files is the list, and a string such as "uniform" or "prune:keep=3" builds one.

A plugin is one file holding one frozen dataclass, named alone in the file's `__all__`; the fields of the dataclass are its knobs.
There is no registry: a file that is there is available, under its own name.
"""

import ast
import difflib
import math
import types
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from pkgutil import iter_modules
from typing import Literal, Union, get_args, get_origin, get_type_hints

from mmsdk.errors import PluginError

__all__ = ["Spec", "about", "available", "build", "check", "find", "knobs", "load", "parse"]


@dataclass(frozen=True, slots=True)
class Spec:
    """What a string "name:amount,knob=value,..." asks for. `amount` is empty where the string has none; values are still text."""

    name: str
    amount: str = ""
    knobs: tuple[tuple[str, str], ...] = ()


def available(package: str) -> list[str]:
    """The plugins of a package ("mmsdk.tokencomp.methods") by name, sorted; files that begin with an underscore are private."""
    return sorted(entry.name for entry in iter_modules(import_module(package).__path__) if not entry.name.startswith("_"))


def parse(text: str) -> Spec:
    """Split "name", "name:amount", "name:knob=value,..." or "name:amount,knob=value,..." without looking anything up.

    Raises PluginError for an empty name, an empty part, a second bare value or a knob given twice.
    """
    name, colon, rest = (part.strip() for part in text.partition(":"))
    if not name:
        raise PluginError(f"{text!r} names no method; write 'name' or 'name:knob=value,...'")
    parts = [part.strip() for part in rest.split(",")] if colon else []
    amount = parts.pop(0) if parts and parts[0] and "=" not in parts[0] else ""
    pairs: dict[str, str] = {}
    for part in parts:
        knob, _, value = (side.strip() for side in part.partition("="))
        if not knob or not value:
            raise PluginError(f"{text!r}: cannot read {part!r}; after the name come parts like knob=value, separated by commas")
        if knob in pairs:
            raise PluginError(f"{text!r} sets {knob!r} twice")
        pairs[knob] = value
    return Spec(name, amount, tuple(pairs.items()))


def about(package: str, name: str) -> str:
    """The first line of a plugin file's docstring, read without importing it: some need seconds for that. "" where it has none."""
    spec = find_spec(f"{package}.{name}")
    if spec is None or spec.origin is None:
        raise PluginError(f"{package} has no {name!r}{_near(name, available(package))}")
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def find(package: str, name: str) -> types.ModuleType:
    """Import the plugin file `name` of `package`. Raises PluginError, saying what is near, where there is none."""
    check(package, name)
    return import_module(f"{package}.{name}")


def check(package: str, name: str) -> None:
    """Raises PluginError, saying what is near, where `package` has no plugin `name`; imports nothing."""
    names = available(package)
    if name not in names:
        raise PluginError(f"{package} has no {name!r}{_near(name, names)}")


def knobs(package: str, name: str) -> dict[str, str]:
    """The knobs of a plugin in order, each with its default as text ("required" where there is none)."""
    parameters = signature(_plugin(package, name)).parameters.values()
    return {entry.name: "required" if entry.default is Parameter.empty else repr(entry.default) for entry in parameters}


def build(package: str, spec: Spec) -> object:
    """Build the plugin that `spec` asks for; `spec.amount` belongs to the caller and is not looked at.

    Text becomes the type of the field: bool (true, false), int, float (finite), str, a Literal choice, or any of these `| None` (none).
    Raises PluginError for an unknown name or knob, a missing knob, and a value that does not fit its field.
    """
    plugin = _plugin(package, spec.name)
    parameters = signature(plugin).parameters
    kinds = get_type_hints(plugin)
    for knob, _ in spec.knobs:
        if knob not in parameters:
            raise PluginError(f"{spec.name!r} has no knob {knob!r}{_near(knob, list(parameters))}")
    values = {knob: _convert(kinds[knob], text, f"{spec.name}:{knob}") for knob, text in spec.knobs}
    for knob, entry in parameters.items():
        if knob not in values and entry.default is Parameter.empty:
            raise PluginError(f"{spec.name!r} needs a value for its knob {knob!r}: write '{spec.name}:{knob}=...'")
    built: object = plugin(**values)
    return built


def load(package: str, text: str) -> object:
    """Build the plugin that "name" or "name:knob=value,..." asks for; see `build` for the values and the errors."""
    spec = parse(text)
    if spec.amount:
        raise PluginError(f"{text!r}: {spec.amount!r} is not of the form knob=value")
    return build(package, spec)


def _plugin(package: str, name: str) -> type:
    module = find(package, name)
    exported: Sequence[str] = getattr(module, "__all__", ())
    plugin = getattr(module, exported[0], None) if len(exported) == 1 else None
    if not isinstance(plugin, type) or not is_dataclass(plugin):
        raise PluginError(f"{module.__name__} is no plugin: its __all__ must name exactly one dataclass, and names {list(exported)}")
    return plugin


def _near(wrong: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(wrong, known, n=1)
    meant = f"; did you mean {close[0]!r}? There is" if close else "; there is"
    return f"{meant} {', '.join(sorted(known)) or 'none'}"


def _convert(kind: object, text: str, knob: str) -> object:
    """Turn the text of one knob into the type of its field."""
    if get_origin(kind) in (Union, types.UnionType):
        options = get_args(kind)
        if type(None) in options and text == "none":
            return None
        concrete = [option for option in options if option is not type(None)]
        if len(concrete) == 1:
            return _convert(concrete[0], text, knob)
    if get_origin(kind) is Literal:
        return _choose({str(choice): choice for choice in get_args(kind)}, text, knob)
    if kind is bool:
        return _choose({"true": True, "false": False}, text, knob)
    if kind is str:
        return text
    if kind is int or kind is float:
        return _number(kind, text, knob)
    raise PluginError(f"{knob} cannot be written in a string: it is a {kind}; build the object in Python instead")


def _choose(choices: dict[str, object], text: str, knob: str) -> object:
    if text not in choices:
        raise PluginError(f"{knob} is one of {', '.join(choices)}; got {text!r}")
    return choices[text]


def _number(kind: type[int] | type[float], text: str, knob: str) -> int | float:
    wanted = "a whole number" if kind is int else "a finite number"
    try:
        value = kind(text)
    except ValueError as error:
        raise PluginError(f"{knob} is {wanted}; got {text!r}") from error
    if not math.isfinite(value):
        raise PluginError(f"{knob} is {wanted}; got {text!r}")
    return value
