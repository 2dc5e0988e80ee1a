"""`mmsdk completion bash|zsh|fish`: a script for the shell, which then completes what stands behind `mmsdk`."""

import argparse
import json

from mmsdk.apps.shells import SHELLS

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    script = SHELLS[args.shell]()
    print(json.dumps({"shell": args.shell, "script": script}) if args.json else script, end="\n" if args.json else "")
    return 0
