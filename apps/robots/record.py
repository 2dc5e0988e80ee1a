"""`mmsdk robot record FILE.py:NAME --out FOLDER --ticks N`: run a policy on a robot, and write down everything that the loop was told.

FILE.py holds a function NAME() that gives a `mmsdk.vla.drive.Session`. FOLDER becomes a rosbag2, closed in order also after Ctrl-C.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from mmsdk.apps.loading import made
from mmsdk.errors import InputError
from mmsdk.vla.drive import Session
from mmsdk.vla.record.recorder import Recording

__all__ = ["run"]

USAGE = "write: mmsdk robot record FILE.py:NAME --out FOLDER"


def run(args: argparse.Namespace) -> int:
    """Run so many ticks; however that ends, the robot comes to rest and the recording is whole."""
    if len(args.words) != 1 or not args.out or args.ticks < 1:
        raise InputError(f"expected one session, a folder and at least one tick; {USAGE}", item=" ".join(args.words))
    session = made(args.words[0], Session, USAGE)
    with Recording(Path(args.out)) as recording:
        drive = recording.drive(session)
        drive.warm_up()
        try:
            for _ in range(args.ticks):
                drive.step()
        finally:
            drive.settle()
    report = drive.report()
    told = {"recording": args.out, "robot": session.robot.contract.name, **asdict(report)}
    print(json.dumps(told) if args.json else f"{report}\nrecorded in {args.out}", flush=True)
    return 0
