"""`mmsdk robot export FOLDER... --out FOLDER`: recordings of one robot as a LeRobotDataset v3.0; each reset begins an episode."""

import argparse
import json
from pathlib import Path

from mmsdk.errors import InputError
from mmsdk.vla.lerobot.from_tape import add_tape
from mmsdk.vla.lerobot.writer import DatasetWriter
from mmsdk.vla.record.replay import Tape

__all__ = ["run"]

USAGE = "write: mmsdk robot export FOLDER... --out FOLDER"


def run(args: argparse.Namespace) -> int:
    """Write the data set; all recordings must be of one contract."""
    if not args.out:
        raise InputError(f"expected a folder for the data set; {USAGE}", item="--out")
    contract = Tape(Path(args.words[0])).contract
    episodes = frames = 0
    with DatasetWriter(Path(args.out), contract, video=not args.pictures) as dataset:
        for word in args.words:
            tape = Tape(Path(word))
            if tape.contract != contract:
                raise InputError(f"is of {tape.contract.name} by another contract than {args.words[0]}", item=word)
            found = add_tape(tape, dataset)
            episodes, frames = episodes + found[0], frames + found[1]
    told = {"dataset": args.out, "robot": contract.name, "episodes": episodes, "frames": frames}
    print(json.dumps(told) if args.json else f"{episodes} episodes, {frames} frames in {args.out}", flush=True)
    return 0
