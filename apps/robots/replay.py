"""`mmsdk robot replay FOLDER`: a recorded loop once more, which must send the same commands, bit for bit; 1 where it does not.

With --session FILE.py:NAME, a function that gives a `mmsdk.vla.drive.Session`, the kinematics are that one's; with --ask its policy is
asked again.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from mmsdk.apps.loading import made
from mmsdk.errors import InputError
from mmsdk.vla.drive import Session
from mmsdk.vla.record.replay import Replay

__all__ = ["run"]

USAGE = "write: mmsdk robot replay FOLDER [--session FILE.py:NAME [--ask]]"


def run(args: argparse.Namespace) -> int:
    """Replay, and say whether it was the same."""
    if len(args.words) != 1 or (args.ask and not args.session):
        raise InputError(f"expected one recording, and a session to ask; {USAGE}", item=" ".join(args.words))
    session = made(args.session, Session, USAGE) if args.session else None
    policy = session.policy if session is not None and args.ask else None
    done = Replay(Path(args.words[0]), policy, None if session is None else session.forward).run()
    told = {"identical": done.identical, "commands": done.commands, "difference": done.difference, "report": asdict(done.report)}
    text = f"{done.commands} commands the same, bit for bit"
    print(json.dumps(told) if args.json else text + (f", then {done.difference}" if done.difference else ""), flush=True)
    return 0 if done.identical else 1
