"""Public functions that take settings by name: who misspells one is told what was meant."""

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import Parameter, signature
from typing import ParamSpec, TypeVar

from mmsdk.errors import InputError
from mmsdk.plugins import near

__all__ = ["door", "doors"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def door(function: Callable[P, R]) -> Callable[P, R]:
    """The same function. Called with a name that it does not take it raises InputError, where Python's own error would be a TypeError."""
    known = [one.name for one in signature(function).parameters.values() if one.kind is not Parameter.POSITIONAL_ONLY]
    known = [name for name in known if name != "self"]

    @wraps(function)
    def checked(*given: P.args, **settings: P.kwargs) -> R:
        _check(settings, known)
        return function(*given, **settings)

    return checked


def doors(kind: type[T]) -> type[T]:
    """The same dataclass, of whose fields this holds when it is made."""
    # a method is not assigned to, as type checkers see it
    setattr(kind, "__init__", door(kind.__init__))  # noqa: B010
    return kind


def _check(given: Iterable[str], known: list[str]) -> None:
    for name in given:
        if name not in known:
            raise InputError(f"there is no such setting; {near(name, known)}there is {', '.join(known) or 'none'}", item=name)
