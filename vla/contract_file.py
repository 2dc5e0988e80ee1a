"""Contracts as YAML, read strictly: what is misspelt, missing, doubled or of a wrong type is named."""

import dataclasses
import difflib
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from mmsdk.errors import InputError
from mmsdk.vision.values import cause
from mmsdk.vla.contract import Contract
from mmsdk.vla.strict_yaml import read_yaml

__all__ = ["contract_text", "load_contract", "parse_contract"]

# more numbers than any feature of a robot has: a short file asks for no more memory than that
_MOST = 4096


def load_contract(path: str | Path) -> Contract:
    """The contract in a YAML file. Raises InputError, naming the file and the place in it."""
    place = Path(path)
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {cause(error)}", item=str(path)) from None
    return parse_contract(text, str(path))


def parse_contract(text: str, item: str = "contract") -> Contract:
    """The contract that YAML text describes: the fields of `Contract` by name; a number may stand where all of a feature's are equal.

    The feature's fields of an action stand among the command's own. Raises InputError.
    """
    tree = read_yaml(text, item)
    built = _built(Contract, tree, item)
    assert isinstance(built, Contract)
    return built


def contract_text(contract: Contract) -> str:
    """YAML text that `parse_contract` makes the same contract of, every number bit for bit."""
    text: str = yaml.safe_dump(_plain(contract), sort_keys=False)
    return text


def _plain(value: object) -> object:
    """A dataclass as a mapping, what stands open left out, a command's feature among its own fields."""
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    if not dataclasses.is_dataclass(value):
        return value
    named = {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
    inner = _plain(named.pop("feature")) if "feature" in named else {}
    assert isinstance(inner, dict), "a feature is a dataclass"
    return inner | {name: _plain(entry) for name, entry in named.items() if entry is not None}


def _built(kind: Any, tree: object, place: str) -> object:
    """A dataclass from a mapping; a `feature` field takes its own fields from the same mapping."""
    if not isinstance(tree, Mapping):
        raise InputError(f"expected the fields of a {kind.__name__.lower()}, got {tree!r}", item=place)
    hints = get_type_hints(kind)
    fields = {entry.name: entry for entry in dataclasses.fields(kind)}
    inner = hints.get("feature")
    inside = {entry.name for entry in dataclasses.fields(inner)} if isinstance(inner, type) and dataclasses.is_dataclass(inner) else set()
    known = (fields.keys() - {"feature"}) | inside
    for key in tree:
        if key not in known:
            near = difflib.get_close_matches(str(key), sorted(known), n=1)
            raise InputError(f"{key!r} is not known{f'; did you mean {near[0]!r}?' if near else ''}", item=place)
    values: dict[str, object] = {}
    if inside and isinstance(inner, type):
        values["feature"] = _built(inner, {key: value for key, value in tree.items() if key in inside}, place)
    spread = _spread(tree, place)
    for name in fields:
        if name in spread:
            values[name] = _value(hints[name], spread[name], f"{place}: {name}")
    missing = [name for name, entry in fields.items() if name not in values and not _has_default(entry)]
    if missing:
        raise InputError(f"{', '.join(missing)} missing", item=place)
    try:
        return kind(**values)
    except InputError as error:
        raise InputError(str(error), item=place) from None


def _has_default(entry: "dataclasses.Field[object]") -> bool:
    return entry.default is not dataclasses.MISSING or entry.default_factory is not dataclasses.MISSING


def _spread(tree: Mapping[str, object], place: str) -> dict[str, object]:
    """One number for low or high stands for all `size` of them."""
    size = tree.get("size")
    if isinstance(size, int) and size > _MOST:
        raise InputError(f"size: {size:,} numbers, expected at most {_MOST:,}", item=place)
    ends = {name: [tree[name]] * size for name in ("low", "high") if isinstance(size, int) and isinstance(tree.get(name), int | float)}
    return {**tree, **ends}


def _value(kind: object, value: object, place: str) -> object:
    origin, choices = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        (one,) = [choice for choice in choices if choice is not type(None)]
        return _value(one, value, place)
    if origin is Literal:
        # True is equal to 1, and 90.0 to 90
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            raise InputError(f"{value!r} is none of {', '.join(map(str, choices))}", item=place)
        return value
    if origin is tuple:
        return _tuple(choices, value, place)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _built(kind, value, place)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > sys.float_info.max:
            raise InputError("a number beyond all that a float holds", item=place)
        return float(value)
    if not isinstance(kind, type) or not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        fix = " (YAML takes 1e-3 for text: write 1.0e-3)" if kind is float and isinstance(value, str) else ""
        raise InputError(f"expected {getattr(kind, '__name__', kind)}, got {value!r}{fix}", item=place)
    return value


def _tuple(choices: tuple[object, ...], value: object, place: str) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise InputError(f"expected a list, got {value!r}", item=place)
    kinds = [choices[0]] * len(value) if choices[-1] is Ellipsis else list(choices)
    if len(kinds) != len(value):
        raise InputError(f"expected {len(kinds)} entries, got {len(value)}", item=place)
    return tuple(_value(kind, entry, f"{place}[{index}]") for index, (kind, entry) in enumerate(zip(kinds, value, strict=True)))
