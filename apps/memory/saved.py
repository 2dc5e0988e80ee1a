"""Rows of a long bench in a file, suite by suite, so that a run that is broken off goes on where it stood."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from mmsdk.apps.console import Cell
from mmsdk.errors import InputError

__all__ = ["Rows", "resumed"]

Rows = list[dict[str, Cell]]


def resumed(path: Path, settings: str, suites: Sequence[str], measure: Callable[[str], Iterable[dict[str, Cell]]]) -> Rows:
    """The rows of all suites, those in the file as they are; each of the others is written there, a line of JSON, when it is done.

    Raises InputError for a file of other settings, and one that is none of these.
    """
    known = _known(path, settings) if path.exists() else {}
    for suite in suites:
        if suite not in known:
            known[suite] = list(measure(suite))
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"settings": settings, "suite": suite, "rows": known[suite]}) + "\n")
    return [row for suite in suites for row in known[suite]]


def _known(path: Path, settings: str) -> dict[str, Rows]:
    try:
        parts = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        known: dict[str, Rows] = {part["suite"]: part["rows"] for part in parts}
        begun = {part["settings"] for part in parts}
    except (ValueError, TypeError, KeyError) as error:
        raise InputError("it holds something else than rows of this bench; name a new file", item=str(path)) from error
    if begun - {settings}:
        raise InputError(f"it was begun with other settings: {', '.join(begun - {settings})}; give these, or a new file", item=str(path))
    return known
