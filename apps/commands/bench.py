"""`mmsdk bench NAME`: run a bench and print one object, or print the one kept in the repository.

A bench is one file in apps/bench: a frozen dataclass whose fields are its knobs, called without arguments, returning flat rows.
To keep a result: `mmsdk bench NAME --json > benchmarks/results/NAME.json`.
"""

import argparse
import json
import shlex
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from mmsdk import plugins
from mmsdk.apps.console import Cell, line_width, table
from mmsdk.apps.report import ROOT, hardware, versions
from mmsdk.errors import InputError, PluginError

__all__ = ["Bench", "Judged", "Versioned", "run"]

PACKAGE = "mmsdk.apps.bench"


@runtime_checkable
class Bench(Protocol):
    """Measures something and returns flat rows that share their keys."""

    def __call__(self) -> list[dict[str, Cell]]: ...


@runtime_checkable
class Versioned(Protocol):
    """A bench whose result depends on further files: `versions` says which ones these are, beside the libraries."""

    def versions(self) -> dict[str, str]: ...


@runtime_checkable
class Judged(Protocol):
    """A bench that was to reach something: `aims` says of its rows what, and whether they do."""

    def aims(self, rows: list[dict[str, Cell]]) -> list[dict[str, Cell]]: ...


def run(args: argparse.Namespace) -> int:
    """Print a result as a table or as one JSON object; without a name, print what there is."""
    if args.name is None:
        rows: list[dict[str, Cell]] = [{"bench": name, "about": plugins.about(PACKAGE, name)} for name in plugins.available(PACKAGE)]
        print(json.dumps({"benches": rows}) if args.json else table(rows, line_width()))
        return 0
    text = _knob(args.name, "compile_only=true") if args.compile_only else args.name
    result = _committed(text) if args.committed else _measured(text)
    print(json.dumps(result) if args.json else _readable(result))
    return 0


def _knob(text: str, knob: str) -> str:
    return f"{text},{knob}" if ":" in text else f"{text}:{knob}"


def _measured(text: str) -> dict[str, object]:
    bench = plugins.load(PACKAGE, text)
    if not isinstance(bench, Bench):
        raise PluginError(f"{text!r} in {PACKAGE} cannot be called")
    command = f"mmsdk bench {shlex.quote(_without_files(text))} --json"
    used = versions() | (bench.versions() if isinstance(bench, Versioned) else {})
    rows = bench()
    judged = {"aims": bench.aims(rows)} if isinstance(bench, Judged) else {}
    return {"bench": plugins.parse(text).name, "command": command, "hardware": hardware(), "versions": used, "rows": rows, **judged}


def _without_files(text: str) -> str:
    """What is measured, without the knobs that say where on this machine it is written to."""
    name, _, knobs = text.partition(":")
    kept = ",".join(knob for knob in knobs.split(",") if knob.partition("=")[0] not in ("plot", "saved"))
    return f"{name}:{kept}" if kept else name


def _committed(text: str) -> dict[str, object]:
    spec = plugins.parse(text)
    name = spec.name
    plugins.check(PACKAGE, name)
    if spec.amount or spec.knobs:
        raise InputError("one result of each bench is kept, whatever its knobs; leave them out, or leave out --committed", item=text)
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    if not path.is_file():
        raise InputError(f"no result of this bench is kept here; run `mmsdk bench {name}`", item=name)
    kept: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return kept


def _readable(result: Mapping[str, object]) -> str:
    head = [f"{key}: {_line(result[key])}" for key in ("bench", "command", "hardware", "versions")]
    shown = [rows for rows in (result["rows"], result.get("aims")) if isinstance(rows, list)]
    return "\n".join([*head, *(f"\n{table(rows, line_width())}" for rows in shown)])


def _line(value: object) -> str:
    return ", ".join(f"{key} {part}" for key, part in value.items() if part != "") if isinstance(value, dict) else str(value)
