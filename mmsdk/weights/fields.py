"""A checkpoint's own settings, read with their types checked: nothing in a downloaded file is taken on trust."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from mmsdk.errors import ModelError, WeightsError
from mmsdk.vision.values import cause

__all__ = ["Fields", "read_fields"]


@dataclass(frozen=True, slots=True)
class Fields:
    """Settings by name. `where` says in messages what was read. A setting that is absent or null takes the default, where there is one."""

    where: str
    values: Mapping[str, object]

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number. Raises ModelError where there is none."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(name, "a whole number")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """A finite number. Raises ModelError where there is none."""
        value = self._value(name, default)
        # A whole number beyond a float's reach is no finite number either.
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300 or not math.isfinite(value):
            raise self.wrong(name, "a finite number")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """True or false. Raises ModelError where there is neither."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A text. Raises ModelError where there is none."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a text")
        return value

    def reals(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """Finite numbers, one for each channel for example. Raises ModelError where there are none."""
        return tuple(self._member(name, value).real(name) for value in self._listed(name, default))

    def wholes(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Whole numbers; one that stands alone is a list of one. Raises ModelError where there are none."""
        if isinstance(self.values.get(name), int):
            return (self.whole(name),)
        return tuple(self._member(name, value).whole(name) for value in self._listed(name, default))

    def pairs(self, name: str) -> tuple[tuple[int, int], ...]:
        """Pairs of whole numbers, such as heights and widths. Raises ModelError where there are none."""
        pairs = [self._member(name, value).wholes(name) for value in self._listed(name, ())]
        if any(len(pair) != 2 for pair in pairs):
            raise self.wrong(name, "a list of pairs")
        return tuple((pair[0], pair[1]) for pair in pairs)

    def group(self, name: str) -> "Fields":
        """Settings within a setting; none where it is absent. Raises ModelError where it is something else."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise self.wrong(name, "a group of settings")
        return Fields(f"{self.where}: {name}", cast(dict[str, object], value))

    def has(self, name: str) -> bool:
        """Whether it is there and not null."""
        return self.values.get(name) is not None

    def wrong(self, name: str, wanted: str) -> ModelError:
        """The error for a setting that is not what it should be."""
        return ModelError(f"{self.where}: {name} is {self.values.get(name)!r}, it must be {wanted}")

    def _listed(self, name: str, default: Sequence[object]) -> Sequence[object]:
        value = self._value(name, default)
        if not isinstance(value, list | tuple):
            raise self.wrong(name, "a list")
        return value

    def _member(self, name: str, value: object) -> "Fields":
        """One of a list, to be read as a setting by itself."""
        return Fields(self.where, {name: value})

    def _value(self, name: str, default: object) -> object:
        found = self.values.get(name)
        return default if found is None else found


def read_fields(path: Path) -> Fields:
    """A JSON file of settings. Raises WeightsError where it cannot be read, ModelError where it is no JSON object."""
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {cause(error)}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold a JSON object, not a {type(values).__name__}")
    return Fields(str(path), cast(dict[str, object], values))
