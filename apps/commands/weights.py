"""`mmsdk weights pull|list|verify`: the named bundles of model weights in the user's cache folder."""

import argparse
import json

from mmsdk.apps.console import Cell, table, terminal_width
from mmsdk.errors import InputError
from mmsdk.weights.bundle import PartState, available, pull, verify

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Fetch, list or hash. Verifying returns 1 where something is damaged or missing. Raises InputError for an unknown bundle."""
    _check(args.name)
    if args.action == "pull":
        return _pull(args.name or "mini", args.json)
    states = verify(args.name or "mini") if args.action == "verify" else [s for s in available() if args.name in (None, s.bundle)]
    rows = [_row(state) for state in states]
    print(json.dumps({"weights": rows}) if args.json else table(rows, terminal_width()))
    bad = [state for state in states if state.state != "ok"]
    if args.action == "verify" and bad and not args.json:
        print(f"\nmend it with: mmsdk weights pull {bad[0].bundle}")
    return 1 if args.action == "verify" and bad else 0


def _check(name: str | None) -> None:
    bundles = list(dict.fromkeys(state.bundle for state in available()))
    if name is not None and name not in bundles:
        raise InputError(f"no bundle is called so; there are {', '.join(bundles)}", item=name)


def _pull(name: str, as_json: bool) -> int:
    paths = pull(name)
    rows: list[dict[str, Cell]] = [{"part": part, "path": str(path)} for part, path in paths.items()]
    print(json.dumps({"weights": rows}) if as_json else table(rows, terminal_width()))
    return 0


def _row(state: PartState) -> dict[str, Cell]:
    size = round(state.size / 1e6, 1)
    return {"bundle": state.bundle, "part": state.part, "state": state.state, "mb": size, "licence": state.licence, "path": str(state.path)}
