"""Methods by name: a folder of plugin files is the list, and a string such as "uniform" or "prune:keep=3" builds one.

A plugin is one file holding one frozen dataclass, named alone in the file's `__all__`; the fields of the dataclass are its knobs.
There is no registry: a file that is there is available, under its own name.
"""

import ast
import difflib
import math
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from pkgutil import iter_modules
from typing import Literal, Union, get_args, get_origin, get_type_hints

from mmsdk.errors import PluginError

__all__ = ["Spec", "about", "available", "build", "check", "find", "knobs", "load", "near", "nearest", "number", "parse"]

_CONSTANT = (ast.Constant, ast.Tuple, ast.expr_context, ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator)


@dataclass(frozen=True, slots=True)
class Spec:
    """What a string "name:amount,knob=value,..." asks for. `amount` is empty where the string has none; values are still text."""

    name: str
    amount: str = ""
    knobs: tuple[tuple[str, str], ...] = ()


def available(package: str) -> list[str]:
    """The plugins of a package ("mmsdk.tokencomp.methods") by name, sorted; files that begin with an underscore are private."""
    return sorted(entry.name for entry in iter_modules(_folders(package)) if not entry.name.startswith("_"))


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
    text = ast.get_docstring(_source(package, name)) or ""
    return text.partition("\n")[0]


def find(package: str, name: str) -> types.ModuleType:
    """Import the plugin file `name` of `package`. Raises PluginError, saying what is near, where there is none."""
    check(package, name)
    return import_module(f"{package}.{name}")


def check(package: str, name: str) -> None:
    """Raises PluginError, saying what is near, where `package` has no plugin `name`; imports nothing."""
    names = available(package)
    if name not in names:
        raise PluginError(_unknown(name, names))


def knobs(package: str, name: str) -> dict[str, str]:
    """The knobs of a plugin in order, each with its default as text ("required" where there is none), read without importing it.

    A default is told by its value where it is made of constants, the file's own among them, else as it stands in the file. Raises
    PluginError for an unknown name and for a file that is no plugin.
    """
    check(package, name)
    body = _source(package, name).body
    exported = [text for node in body if isinstance(node, ast.Assign) for text in _exported(node)]
    written = [node for node in body if isinstance(node, ast.ClassDef) and [node.name] == exported and _is_dataclass(node)]
    if len(written) != 1:
        raise _no_plugin(f"{package}.{name}", exported)
    known = _constants(body)
    return {knob: _default(value, known) for node in written[0].body if isinstance(node, ast.AnnAssign) for knob, value in _field(node)}


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
            known = _known(knob, list(parameters)) if parameters else "it has none"
            raise PluginError(f"{spec.name!r} has no knob {knob!r}; {known}")
    values = {knob: _convert(kinds[knob], text, f"{spec.name}:{knob}") for knob, text in spec.knobs}
    for knob, entry in parameters.items():
        if knob not in values and entry.default is Parameter.empty:
            raise PluginError(f"{spec.name!r} needs a value for its knob {knob!r}: write '{spec.name}:{knob}=...'")
    built: object = plugin(**values)
    return built


def load(package: str, text: str) -> object:
    """Build the plugin that "name" or "name:knob=value,..." asks for; see `build` for the values and the errors."""
    spec = parse(text)
    check(package, spec.name)
    if spec.amount:
        raise PluginError(f"{text!r}: {spec.amount!r} is not of the form knob=value")
    return build(package, spec)


def number(kind: type[int] | type[float], text: str) -> int | float:
    """The number that a text is, in plain ASCII digits: Python reads those of all scripts, and passes over underscores between them.

    Raises ValueError for what is none.
    """
    if not text.isascii() or "_" in text:
        raise ValueError(f"{text!r} is not written in plain digits")
    return kind(text)


def _plugin(package: str, name: str) -> type:
    module = find(package, name)
    exported: Sequence[str] = getattr(module, "__all__", ())
    plugin = getattr(module, exported[0], None) if len(exported) == 1 else None
    if not isinstance(plugin, type) or not is_dataclass(plugin):
        raise _no_plugin(module.__name__, exported)
    return plugin


def _no_plugin(module: str, exported: Sequence[str]) -> PluginError:
    return PluginError(f"{module} is no plugin: its __all__ must name exactly one dataclass, and names {list(exported)}")


def _source(package: str, name: str) -> ast.Module:
    """The plugin file as it is written."""
    places = [Path(folder, file) for folder in _folders(package) for file in (f"{name}.py", f"{name}/__init__.py")]
    for place in places:
        if place.is_file():
            return ast.parse(place.read_text(encoding="utf-8"))
    raise PluginError(_unknown(name, available(package)))


def _folders(package: str) -> list[str]:
    """Where the files of a package are. What lies around it is not imported, but for the outermost: some need seconds for that."""
    outer, rest = package.split(".")[:2], package.split(".")[2:]
    spec = find_spec(".".join(outer))
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"no package named {package!r}", name=package)
    return [str(Path(place, *rest)) for place in spec.submodule_search_locations]


def _exported(node: ast.Assign) -> list[str]:
    """The names of an assignment `__all__ = [...]`, none of any other."""
    if ast.unparse(node.targets[0]) != "__all__" or not isinstance(node.value, ast.List | ast.Tuple):
        return []
    return [str(part.value) for part in node.value.elts if isinstance(part, ast.Constant)]


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any(re.match(r"(dataclasses\.)?dataclass\b", ast.unparse(decorator)) for decorator in node.decorator_list)


def _field(node: ast.AnnAssign) -> list[tuple[str, ast.expr | None]]:
    """Name and default of a line of the class that declares a field, nothing of one that declares a class variable."""
    shared = re.match(r"(typing\.)?ClassVar\b", ast.unparse(node.annotation))
    return [(node.target.id, node.value)] if isinstance(node.target, ast.Name) and not shared else []


def _constants(body: Sequence[ast.stmt]) -> dict[str, object]:
    """The names at the top of a file that stand for constants."""
    known: dict[str, object] = {}
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_constant(node.value, known):
            known[node.targets[0].id] = _evaluated(node.value, known)
    return known


def _default(value: ast.expr | None, known: Mapping[str, object]) -> str:
    if value is None:
        return "required"
    return repr(_evaluated(value, known)) if _is_constant(value, known) else ast.unparse(value)


def _is_constant(value: ast.expr, known: Mapping[str, object]) -> bool:
    """Whether it is made of constants and arithmetic alone: nothing in it can be called."""
    return all(isinstance(part, _CONSTANT) or (isinstance(part, ast.Name) and part.id in known) for part in ast.walk(value))


def _evaluated(value: ast.expr, known: Mapping[str, object]) -> object:
    return eval(compile(ast.Expression(value), "default", "eval"), dict(known))


def near(wrong: str, known: Sequence[str]) -> str:
    """The beginning of a message on a word that is not known: what was meant, where something known is near, else nothing."""
    close = nearest(wrong, known)
    return f"did you mean {close!r}? " if close else ""


def nearest(wrong: str, known: Sequence[str]) -> str:
    """The known word that is most like this one, whatever its case, or "": each word of `min_tokens` must be like that of `max_tokens`."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(wrong.lower(), list(names))
    return next((names[one] for one in close if _word_by_word(wrong.lower(), one)), "")


def _word_by_word(one: str, other: str) -> bool:
    """Whether each word of the one is like the word in its place of the other; of names of different numbers of words nothing is said."""
    words, others = (re.split("[-_]", name) for name in (one, other))
    pairs = zip(words, others, strict=False)
    return len(words) != len(others) or all(difflib.SequenceMatcher(None, *pair).ratio() >= 0.5 for pair in pairs)


def _unknown(name: str, names: Sequence[str]) -> str:
    return f"nothing is called {name!r} here; {_known(name, names)}"


def _known(wrong: str, known: Sequence[str]) -> str:
    return f"{near(wrong, known)}there is {', '.join(sorted(known)) or 'none'}"


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
        value = number(kind, text)
    except ValueError as error:
        raise PluginError(f"{knob} is {wanted}; got {text!r}") from error
    if not math.isfinite(value):
        raise PluginError(f"{knob} is {wanted}; got {text!r}")
    return value
