"""`mmsdk robot serve|record|replay|export`: policies served, loops recorded and replayed, recordings as data sets.

Each is a module of `mmsdk.apps.robots`, imported when it is asked for, for each needs other extras.
"""

import argparse
from importlib import import_module

from mmsdk.errors import InputError

__all__ = ["run"]

_NEEDS = {"serve": "serve", "record": "ros", "replay": "ros", "export": "ros,lerobot"}


def run(args: argparse.Namespace) -> int:
    """Do what was asked for. Raises InputError, naming the extra, where a package is missing."""
    try:
        module = import_module(f"mmsdk.apps.robots.{args.action}")
    except ModuleNotFoundError as error:
        package = (error.name or "mmsdk").partition(".")[0]
        if package == "mmsdk":
            raise
        told = f"the package {package} is not installed: pip install 'mmsdk[{_NEEDS[args.action]}]'"
        raise InputError(told, item=args.action) from None
    code: int = module.run(args)
    return code
