"""The command line: what it does with words, hints for typing mistakes, exit codes. What may be said is in `mmsdk.apps.arguments`.

Little more than these two files is imported for help, and they import neither torch nor a command, so help comes at once, and so does what
`mmsdk.apps.beforehand` finds wrong. Exit codes: 0 answered, 1 something failed that is not the user's doing, 2 a wrong argument or input,
130 interrupted, 141 nobody reads the output any more. With --json, an error is one object on stdout too: {"error": {"type", "message",
"item"}}.
"""

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from mmsdk.apps.arguments import COMMANDS
from mmsdk.apps.beforehand import check
from mmsdk.apps.interrupts import INTERRUPTED, interruptible
from mmsdk.apps.parser import UsageError, near, parser
from mmsdk.apps.threads import limit
from mmsdk.errors import InputError, MmsdkError, SafetyError, WeightsError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors that are the user's to mend are one line on stderr, without a traceback."""
    words = sys.argv[1:] if argv is None else list(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # an answer may hold letters that a terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _run(words)
        # not by sys.stdout.flush(): without an open output there is no sys.stdout
        print(end="", flush=True)
        return code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the reader went away (`| head`)
        _discard_output()
        return 141
    except OSError as error:
        # a full disk, most of all: what mmsdk itself reads and writes has errors of its own
        _discard_output()
        print(f"mmsdk: {error}", file=sys.stderr)
        return 1


def _run(words: list[str]) -> int:
    try:
        args = _parse(words)
        check(args)
        limit(getattr(args, "threads", 0))
        command = import_module(f"mmsdk.apps.commands.{args.command}")
        with interruptible():
            code: int = command.run(args)
        return code
    except (UsageError, MmsdkError) as error:
        print(f"mmsdk: {error}", file=sys.stderr)
        if "--json" in words:
            item = error.item if isinstance(error, InputError) else ""
            print(json.dumps({"error": {"type": type(error).__name__, "message": str(error), "item": item}}))
        return 1 if isinstance(error, WeightsError | SafetyError) else 2


def _discard_output() -> None:
    """Keep the interpreter from failing once more, when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parse(argv: list[str]) -> argparse.Namespace:
    _check_flags(argv)
    made = parser()
    args: argparse.Namespace
    args, extra = made.parse_known_args(argv)
    if args.command is None and extra:
        raise UsageError(f"`mmsdk` does not know {extra[0]!r}{near(extra[0], ('--help', '--version', *COMMANDS))}")
    if args.command is None:
        made.print_help()
        raise SystemExit(0)
    if args.command in ("ask", "chat") and not any(word.startswith("-") for word in extra):
        # argparse takes only the first run of words: `ask photo.jpg --seed 3 "question"`
        args.words, extra = args.words + extra, []
    if extra:
        raise _unknown(args.command, next((word for word in extra if word.startswith("-")), extra[0]))
    return args


def _check_flags(argv: list[str]) -> None:
    """Before argparse, which would first ask for the words that are missing beside a flag that is misspelt."""
    command, *words = argv or [""]
    if command not in COMMANDS:
        return
    for word in words[: words.index("--") if "--" in words else None]:
        if word.startswith("--") and word.partition("=")[0] not in ("--help", *(flag.name for flag in COMMANDS[command].flags)):
            raise _unknown(command, word)


def _unknown(command: str, word: str) -> UsageError:
    wrong = word.split("=")[0]
    return UsageError(
        f"`mmsdk {command}` does not know {wrong!r}{near(wrong, [flag.name for flag in COMMANDS[command].flags] + ['--help'])}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
