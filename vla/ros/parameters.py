"""Parameters of a node: declared with type, range and default, checked before they count, and read from ROS's YAML files.

/**:                      every node
  ros__parameters:
    rate: 20.0
policy:                   the node /policy; more special than any wildcard
  ros__parameters:
    cameras: {front: {topic: /camera/image_raw}}       the parameter cameras.front.topic
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Literal, get_args

import yaml

from mmsdk.errors import InputError
from mmsdk.vision.values import cause
from mmsdk.vla.strict_yaml import read_yaml

__all__ = ["Kind", "Parameter", "Parameters", "Scalar", "Value", "load_parameters", "parse_parameters"]

Kind = Literal["bool", "integer", "double", "string", "bool_array", "integer_array", "double_array", "string_array"]
Scalar = bool | int | float | str
Value = Scalar | tuple[Scalar, ...]
_TYPES: dict[str, type] = {"bool": bool, "integer": int, "double": float, "string": str}
_MARK = "ros__parameters"
_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter; without a default it has to be given. Numbers lie within [low, high], strings are among `choices` if there are any."""

    name: str
    kind: Kind
    default: Value | None = None
    description: str = ""
    low: float = -inf
    high: float = inf
    choices: tuple[str, ...] = ()
    read_only: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InputError(f"the kind {self.kind!r} is none of {', '.join(get_args(Kind))}", item=self.name)
        if self.default is not None:
            self.checked(self.default)

    def checked(self, value: object) -> Value:
        """The value as it counts: a whole number for a double is one. Raises InputError for another type, and out of range."""
        single, _, array = self.kind.partition("_")
        if not array:
            return self._one(single, value, self.name)
        if not isinstance(value, list | tuple):
            raise InputError(f"expected a list of {single}, got {value!r}", item=self.name)
        return tuple(self._one(single, entry, f"{self.name}[{at}]") for at, entry in enumerate(value))

    def _one(self, kind: str, value: object, item: str) -> Scalar:
        # beyond 2^53 it might become another number
        if kind == "double" and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 2**53:
            value = float(value)
        if not isinstance(value, Scalar) or type(value) is not _TYPES[kind]:
            fix = " (YAML takes 1e-3 for text: write 1.0e-3)" if kind == "double" and isinstance(value, str) else ""
            raise InputError(f"expected {kind}, got {value!r}{fix}", item=item)
        if isinstance(value, str):
            if self.choices and value not in self.choices:
                raise InputError(f"{value!r} is none of {', '.join(self.choices)}", item=item)
        elif not isinstance(value, bool):
            if isinstance(value, int) and not -_INT64 <= value < _INT64:
                raise InputError(f"{value} does not fit into 64 bits", item=item)
            # NaN fails this comparison, as it should
            if not self.low <= value <= self.high:
                raise InputError(f"{value:g} lies outside of {self.low:g}..{self.high:g}", item=item)
        return value


class Parameters:
    """The values of a node's declared parameters. Changes are checked together, and all made or none."""

    def __init__(self, declared: Sequence[Parameter], given: Mapping[str, object]) -> None:
        """Raises InputError for a parameter that is declared twice, not declared, not given though it has no default, or wrong."""
        self._declared = {parameter.name: parameter for parameter in declared}
        if len(self._declared) != len(declared):
            raise InputError("a parameter is declared twice", item="parameters")
        self._values = {name: parameter.default for name, parameter in self._declared.items() if parameter.default is not None}
        self._values |= self._checked(given)
        missing = [name for name in self._declared if name not in self._values]
        if missing:
            raise InputError(f"{', '.join(missing)} missing", item="parameters")

    def set(self, changes: Mapping[str, object]) -> None:
        """Change some. Raises InputError, and changes nothing, where one is unknown, read only or wrong."""
        fixed = sorted(name for name in changes if name in self._declared and self._declared[name].read_only)
        if fixed:
            raise InputError(f"{', '.join(fixed)} cannot be changed while the node runs", item="parameters")
        self._values |= self._checked(changes)

    def value(self, name: str) -> Value:
        """The value of a parameter, of whatever kind it was declared. Raises InputError for one that was not."""
        if name not in self._declared:
            raise InputError("is not declared", item=name)
        return self._values[name]

    def flag(self, name: str) -> bool:
        """A bool."""
        return bool(self._of(name, "bool"))

    def number(self, name: str) -> float:
        """An integer or a double, as a double."""
        value = self._of(name, "integer", "double")
        assert isinstance(value, int | float), "it was checked"
        return float(value)

    def text(self, name: str) -> str:
        """A string."""
        return str(self._of(name, "string"))

    def texts(self, name: str) -> tuple[str, ...]:
        """An array of strings."""
        value = self._of(name, "string_array")
        assert isinstance(value, tuple), "it was checked"
        return tuple(str(entry) for entry in value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """An array of integers or doubles."""
        value = self._of(name, "integer_array", "double_array")
        assert isinstance(value, tuple), "it was checked"
        return tuple(float(entry) for entry in value)

    def _of(self, name: str, *kinds: Kind) -> Value:
        found = self._declared.get(name)
        if found is None or found.kind not in kinds:
            raise InputError(f"is {found.kind if found else 'not declared'}, asked for as {' or '.join(kinds)}", item=name)
        return self._values[name]

    def _checked(self, given: Mapping[str, object]) -> dict[str, Value]:
        for name in given:
            if name not in self._declared:
                near = difflib.get_close_matches(name, self._declared, n=1)
                raise InputError(f"is not declared{f'; did you mean {near[0]}?' if near else ''}", item=name)
        return {name: self._declared[name].checked(value) for name, value in given.items()}


def load_parameters(path: str | Path, node: str) -> dict[str, object]:
    """What a parameter file says of a node, by its name ("/arm/policy"); see `parse_parameters`. Raises InputError, naming the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {cause(error)}", item=str(path)) from None
    return parse_parameters(text, node, str(path))


def parse_parameters(text: str, node: str, item: str = "parameters") -> dict[str, object]:
    """What YAML text says of a node: names with dots to values. Wildcards (`*` one name, `**` any number) first, then its own name.

    As in rcl, aliases are not allowed. Raises InputError for what is not YAML, a section without ros__parameters, a name that is there
    twice, and what is no value: null, lists in lists.
    """
    tree = read_yaml(text, item)
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
        raise InputError("aliases (*name) are not allowed in parameter files", item=item)
    if not isinstance(tree, Mapping):
        raise InputError(f"expected node names and their {_MARK}, got {tree!r}", item=item)
    wanted = "/" + node.strip("/")
    sections = [(path, section) for path, section in _sections(tree, "", item) if _matches(path, wanted)]
    values: dict[str, object] = {}
    # a stable sort: the node's own name last
    for path, section in sorted(sections, key=lambda entry: entry[0] == wanted):
        values |= _flat(section, "", f"{item}: {path}")
    return values


def _sections(tree: Mapping[object, object], path: str, item: str) -> Iterator[tuple[str, Mapping[object, object]]]:
    for key, value in tree.items():
        if not isinstance(value, Mapping):
            raise InputError(
                f"expected a mapping under {key!r}, got {value!r}; parameters stand under {_MARK}", item=f"{item}: {path or '/'}"
            )
        if key == _MARK:
            yield path or "/", value
        else:
            yield from _sections(value, f"{path}/{str(key).strip('/')}", item)


def _matches(pattern: str, node: str) -> bool:
    parts = [{"**": "(?:/[^/]+)*", "*": "/[^/]+"}.get(part, "/" + re.escape(part)) for part in pattern.strip("/").split("/")]
    return re.fullmatch("".join(parts), node) is not None


def _flat(tree: Mapping[object, object], prefix: str, item: str) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found = _flat(value, f"{name}.", item) if isinstance(value, Mapping) else {name: _plain(value, name, item)}
        twice = sorted(values.keys() & found.keys())
        if twice:
            raise InputError(f"{', '.join(twice)} stands there twice", item=item)
        values |= found
    return values


def _plain(value: object, name: str, item: str) -> object:
    if isinstance(value, list) and all(isinstance(entry, Scalar) for entry in value):
        return tuple(value)
    if isinstance(value, Scalar):
        return value
    raise InputError(f"{name} is {value!r}, expected a value or a list of values", item=item)
