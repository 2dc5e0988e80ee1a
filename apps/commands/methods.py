"""`mmsdk methods`: what can be chosen by name, its knobs, and the first line of its description; read from the files, none is imported."""

import argparse
import json
from collections.abc import Mapping
from types import MappingProxyType

from mmsdk import plugins
from mmsdk.apps.console import Cell, line_width, table

__all__ = ["FAMILIES", "WORDS", "run"]

# The flag that takes a method of each family (--attention, --cache are of `mmsdk imagine`), and the package whose files are its methods.
FAMILIES = {
    "compress": "mmsdk.tokencomp.methods",
    "kv": "mmsdk.kv.policies",
    "attention": "mmsdk.diffusion.attention.methods",
    "cache": "mmsdk.diffusion.step_caches",
}
# What stands beside methods and is none.
WORDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "compress": {
            "proportional": "Beside methods, without an amount: what goes into the language model counts as the tokens that there were."
        }
    }
)


def run(args: argparse.Namespace) -> int:
    """Print the methods of every family."""
    # in a table, a list of knobs can be broken behind its spaces
    between = "," if args.json else ", "
    rows: list[dict[str, Cell]] = []
    for family, package in FAMILIES.items():
        rows += [_row(family, package, name, between) for name in plugins.available(package)]
        rows += [{"family": family, "name": word, "knobs": "", "about": about} for word, about in WORDS.get(family, {}).items()]
    print(json.dumps({"methods": rows}) if args.json else table(rows, line_width()))
    return 0


def _row(family: str, package: str, name: str, between: str) -> dict[str, Cell]:
    knobs = between.join(f"{knob}={default}" for knob, default in plugins.knobs(package, name).items())
    return {"family": family, "name": name, "knobs": knobs, "about": plugins.about(package, name)}
