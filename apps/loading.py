"""What a command line asks for by name: FILE.py:NAME, a function of the user's own, or a module of ours that needs an extra."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from mmsdk.errors import InputError

__all__ = ["found", "made", "needing"]

T = TypeVar("T")


def found(text: str, usage: str, beside: Path = Path()) -> Callable[..., Any]:
    """The function that `text` names; a relative path starts from the folder `beside`. `usage` ends the message of what is no name.

    Raises InputError for a file, a module or a function that there is not; what the file itself raises goes on.
    """
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise InputError(f"it names no function; {usage}", item=text)
    module = _file(beside / place) if place.endswith(".py") else _module(place, usage)
    function = vars(module).get(name)
    if not callable(function):
        functions = [known for known, value in vars(module).items() if isfunction(value) and value.__module__ == module.__name__]
        raise InputError(f"there is no function {name!r} in {place}; there is {', '.join(functions) or 'none'}", item=text)
    result: Callable[..., Any] = function
    return result


def made(text: str, kind: type[T], usage: str, beside: Path = Path()) -> T:
    """What that function gives when it is called. Raises InputError as `found` does, and where that is not of this kind."""
    value = found(text, usage, beside)()
    if not isinstance(value, kind):
        raise InputError(f"{text.rpartition(':')[2]}() gave a {type(value).__name__}, expected a {kind.__name__}", item=text)
    return value


def needing(module: str, extra: str, item: str) -> ModuleType:
    """A module of ours that needs the packages of an extra. Raises InputError, naming the extra, where one of them is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "mmsdk").partition(".")[0]
        if package == "mmsdk":
            raise
        raise InputError(f"the package {package} is not installed: pip install '.[{extra}]' in the clone", item=item) from None


def _file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError("there is no such file", item=str(path))
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by its name
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _module(name: str, usage: str) -> ModuleType:
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise InputError(f"there is no module of that name; {usage}", item=name)
    return importlib.import_module(name)
