"""`mmsdk robot play|serve|record|replay|export`: episodes in simulation, policies served, loops recorded and replayed, data sets.

Each is a module of `mmsdk.apps.robots`, imported when it is asked for, for each needs other extras.
"""

import argparse

from mmsdk.apps.loading import needing

__all__ = ["run"]

_NEEDS = {"play": "robots", "serve": "serve", "record": "ros", "replay": "ros", "export": "ros,lerobot"}


def run(args: argparse.Namespace) -> int:
    """Do what was asked for. Raises InputError, naming the extra, where a package is missing."""
    code: int = needing(f"mmsdk.apps.robots.{args.action}", _NEEDS[args.action], args.action).run(args)
    return code
