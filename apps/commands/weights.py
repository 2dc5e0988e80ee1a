"""`mmsdk weights pull|list|verify`: the named bundles of model weights in the user's cache folder."""

import argparse
import json

from mmsdk.apps.console import Cell, line_width, table
from mmsdk.errors import InputError
from mmsdk.weights.bundle import PartState, available, pull, verify

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Fetch, list or hash. Raises InputError for an unknown bundle.

    Verifying looks at every bundle, or at the one that is named; 1 where something is damaged, or where what was named is absent.
    """
    known = list(dict.fromkeys(state.bundle for state in available()))
    if args.name is not None and args.name not in known:
        raise InputError(f"no bundle is called so; there are {', '.join(known)}", item=args.name)
    if args.action == "pull":
        return _pull(args.name or "mini", args.json)
    chosen = known if args.name is None else [args.name]
    if args.action == "verify":
        return _verify(chosen, args.json, absent_is_bad=args.name is not None)
    states = [state for state in available() if state.bundle in chosen]
    _show([_row(state) for state in states], args.json)
    if not args.json:
        print("", *(f"{state.bundle}/{state.part}: {state.licence}" for state in states), sep="\n")
    return 0


def _verify(bundles: list[str], as_json: bool, absent_is_bad: bool) -> int:
    states = [state for bundle in bundles for state in verify(bundle)]
    _show([_row(state) for state in states], as_json)
    bad = [state.bundle for state in states if state.state == "damaged" or (absent_is_bad and state.state == "absent")]
    if not as_json:
        for bundle in dict.fromkeys(bad):
            print(f"\nmend it with: mmsdk weights pull {bundle}")
    return 1 if bad else 0


def _pull(name: str, as_json: bool) -> int:
    _show([{"part": part, "path": str(path)} for part, path in pull(name).items()], as_json)
    return 0


def _show(rows: list[dict[str, Cell]], as_json: bool) -> None:
    """Licences are sentences: in a column of a table for people they would leave no room for the path; sizes have one digit each there."""
    told = [{name: cell if name != "mb" else f"{cell:8.1f}" for name, cell in row.items() if name != "licence"} for row in rows]
    print(json.dumps({"weights": rows}) if as_json else table(told, line_width()))


def _row(state: PartState) -> dict[str, Cell]:
    size = round(state.size / 1e6, 1)
    return {"bundle": state.bundle, "part": state.part, "state": state.state, "mb": size, "licence": state.licence, "path": str(state.path)}
