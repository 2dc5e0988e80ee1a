"""The command line: arguments, hints for typing mistakes, exit codes.

Little more than this file is imported for help, and it imports neither torch nor a command, so help comes at once. Exit codes: 0 answered,
1 something failed that is not the user's doing, 2 a wrong argument or input, 130 interrupted, 141 nobody reads the output any more.
With --json, an error is one object on stdout too: {"error": {"type", "message", "item"}}.
"""

import argparse
import difflib
import io
import json
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from mmsdk import __version__
from mmsdk.apps.interrupts import INTERRUPTED, interruptible
from mmsdk.errors import InputError, MmsdkError, SafetyError, WeightsError

__all__ = ["UsageError", "main"]

COMMANDS = ("ask", "demo", "serve", "robot", "ros", "methods", "doctor", "weights", "bench")


class UsageError(Exception):
    """The command line itself cannot be understood."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises instead of leaving, and says what is near."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)'", message)
        if wrong and "command" in message:
            raise UsageError(f"there is no command {wrong[1]!r}{_near(wrong[1], COMMANDS)}")
        raise UsageError(f"{message}; `{self.prog} --help` shows what can be said")


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
    parser, options = _parser()
    args, extra = parser.parse_known_args(argv)
    if args.command is None and extra:
        raise UsageError(f"`mmsdk` does not know {extra[0]!r}{_near(extra[0], ('--help', '--version', *COMMANDS))}")
    if args.command is None:
        parser.print_help()
        raise SystemExit(0)
    if args.command == "ask" and not any(word.startswith("-") for word in extra):
        # argparse takes only the first run of words: `ask photo.jpg --seed 3 "question"`
        args.words, extra = args.words + extra, []
    if extra:
        wrong = next((word for word in extra if word.startswith("-")), extra[0]).split("=")[0]
        raise UsageError(f"`mmsdk {args.command}` does not know {wrong!r}{_near(wrong, options[args.command])}")
    return args


def _near(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"


def _parser() -> tuple[Parser, dict[str, list[str]]]:
    parser = Parser(prog="mmsdk", description="Ask a vision-language model about pictures and clips.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"mmsdk {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", parser_class=Parser)
    declared = {
        "ask": _ask(commands.add_parser("ask", help="ask about pictures or clips", allow_abbrev=False)),
        "demo": _demo(commands.add_parser("demo", help="questions about three pictures and a clip, answered", allow_abbrev=False)),
        "serve": _serve(commands.add_parser("serve", help="serve a model to clients of OpenAI's API", allow_abbrev=False)),
        "robot": _robot(commands.add_parser("robot", help="serve policies to robots, record and replay what they did", allow_abbrev=False)),
        "ros": _ros(commands.add_parser("ros", help="run a policy as a ROS 2 node", allow_abbrev=False)),
        "methods": _methods(commands.add_parser("methods", help="list the methods that can be chosen by name", allow_abbrev=False)),
        "doctor": _doctor(commands.add_parser("doctor", help="look at this machine and say what is missing", allow_abbrev=False)),
        "weights": _weights(commands.add_parser("weights", help="fetch, list or verify model weights", allow_abbrev=False)),
        "bench": _bench(commands.add_parser("bench", help="run a benchmark, or print the result kept of one", allow_abbrev=False)),
    }
    return parser, declared


def _option(parser: Parser, flag: str, value: str, text: str, kind: type = str, default: object = None) -> str:
    told = text if default is None else f"{text} (default: {default})"
    parser.add_argument(flag, metavar=value, type=kind, default=default, help=told)
    return flag


def _needed(parser: Parser, flag: str, value: str, text: str) -> str:
    parser.add_argument(flag, metavar=value, required=True, help=text)
    return flag


def _repeated(parser: Parser, flag: str, value: str, text: str) -> str:
    parser.add_argument(flag, metavar=value, action="append", default=[], help=text)
    return flag


def _switch(parser: Parser, flag: str, text: str) -> str:
    parser.add_argument(flag, action="store_true", help=text)
    return flag


def _ask(parser: Parser) -> list[str]:
    parser.usage = 'mmsdk ask PATH... "question" [options]'
    parser.add_argument("words", nargs="+", metavar='PATH... "question"', help="one or more pictures or clips, then the question")
    return [
        _option(parser, "--model", "NAME", 'a model: "mini", a folder, or "org/name"', default="mini"),
        _option(parser, "--max-tokens", "N", "the longest answer, in tokens", int, 128),
        _option(parser, "--temperature", "T", "0 for the likeliest answer, more for variety", float, 0.0),
        _option(parser, "--seed", "N", "chooses the answer where the temperature is above 0", int, 0),
        _repeated(
            parser,
            "--compress",
            "METHOD:AMOUNT",
            'keep fewer visual tokens of each input; AMOUNT is a count of them ("uniform:64"), a share, written with a point '
            '("simplecluster:0.25"), or what a prefill has time for, in quotes ("simplecluster:auto@prefill<200ms"); knobs come behind it '
            '("random:0.25,seed=1"); given again, one works after the other; `mmsdk methods` lists them',
        ),
        _option(parser, "--dtype", "NAME", "auto, float32, bfloat16 or float16", default="auto"),
        _option(parser, "--quantize", "NAME", "how the language model's matrices are stored: none, int8 or int4", default="none"),
        _option(parser, "--device", "NAME", "cpu, cuda, cuda:1, ...", default="cpu"),
        _option(parser, "--explain", "PICTURE", "draw what was looked at into this file (.png, .jpg, ...)"),
        _switch(parser, "--json", "print one JSON object in place of the text"),
    ]


def _demo(parser: Parser) -> list[str]:
    return [
        _option(parser, "--out", "FOLDER", "where the annotated pictures go", default="demo"),
        _option(parser, "--model", "NAME", 'a model: "mini", a folder, or "org/name"', default="mini"),
        _switch(parser, "--json", "print one JSON object in place of the table"),
    ]


def _serve(parser: Parser) -> list[str]:
    return [
        _option(parser, "--model", "NAME", 'a model: "mini", a folder, or "org/name"', default="mini"),
        _option(parser, "--name", "NAME", "what clients call the model (default: what it is called here)"),
        _repeated(parser, "--compress", "METHOD:AMOUNT", "keep fewer visual tokens of each input, as in `mmsdk ask`"),
        _option(parser, "--dtype", "NAME", "auto, float32, bfloat16 or float16", default="auto"),
        _option(parser, "--quantize", "NAME", "how the language model's matrices are stored: none, int8 or int4", default="none"),
        _option(parser, "--device", "NAME", "cpu, cuda, cuda:1, ...", default="cpu"),
        _option(parser, "--host", "HOST", "the address to listen at; 0.0.0.0 lets in the whole network", default="127.0.0.1"),
        _option(parser, "--port", "N", "the port to listen at; 0 takes a free one", int, 8000),
        _option(parser, "--api-key-file", "FILE", "holds the keys of which clients must bring one, each on a line of its own"),
        _repeated(parser, "--allow-host", "HOST", 'a host that pictures and clips are fetched from: "images.example.org", "*.example.org"'),
        _repeated(parser, "--allow-network", "NETWORK", "a private network that such a host may be in: 10.1.0.0/16"),
        _repeated(parser, "--allow-origin", "ORIGIN", "a web page whose scripts may ask: https://chat.example.org"),
        _option(parser, "--rows", "N", "requests that are answered at one time", int, 8),
        _option(parser, "--waiting", "N", "requests that may wait beside them", int, 24),
        _option(parser, "--pool", "N", "tokens that are remembered of all of them together; 0 for 1,024 each and a whole context", int, 0),
        _option(parser, "--max-body-mb", "MB", "the largest request", int, 32),
        _option(parser, "--max-media", "N", "pictures and clips of a request", int, 16),
        _option(parser, "--max-pixels", "N", "pixels of all of them together, once decoded", int, 2**25),
        _option(parser, "--frames", "N", "frames that are taken of a clip", int, 8),
        _option(parser, "--max-tokens", "N", "the longest answer that a request may ask for", int, 1024),
        _option(parser, "--timeout", "S", "the longest time that a request may take", float, 300.0),
        _option(parser, "--grace", "S", "how long what runs may take to finish when the server ends", float, 60.0),
        _switch(parser, "--json", "print one JSON object when the server is ready"),
    ]


def _robot(parser: Parser) -> list[str]:
    actions = "serve a policy over a websocket until Ctrl-C; record a loop, replay a recording, export recordings as a data set"
    parser.add_argument("action", choices=("serve", "record", "replay", "export"), help=actions)
    parser.add_argument("words", nargs="+", metavar="WHAT", help="serve, record: FILE.py:NAME; replay, export: folders of recordings")
    return [
        _option(parser, "--host", "HOST", "serve: the address to listen at; 0.0.0.0 lets in the whole network", default="127.0.0.1"),
        _option(parser, "--port", "N", "serve: the port to listen at; 0 takes a free one", int, 8000),
        _option(parser, "--api-key-file", "FILE", "serve: holds a key that clients must bring"),
        _option(parser, "--out", "FOLDER", "record, export: the folder that is made"),
        _option(parser, "--ticks", "N", "record: how many ticks", int, 400),
        _option(parser, "--session", "FILE.py:NAME", "replay: whose kinematics, and policy, are taken"),
        _switch(parser, "--ask", "replay: ask that policy again"),
        _switch(parser, "--pictures", "export: pictures as they are, in place of videos"),
        _switch(parser, "--json", "print JSON in place of text"),
    ]


def _ros(parser: Parser) -> list[str]:
    parser.add_argument("action", choices=("run", "simulate"), help="run a policy as a node, or an arm in place of the robot, until Ctrl-C")
    return [
        _needed(parser, "--params", "FILE", "the parameter file that says which robot, policy and topics"),
        _option(parser, "--node", "NAME", "the node's full name, which the file speaks of", default="/policy"),
        _option(parser, "--ticks", "N", "end after so many ticks; 0 for no end", int, 0),
        _option(parser, "--record", "FOLDER", "run: record what the loop is told, as `mmsdk robot record` does"),
        _option(parser, "--seconds", "S", "how long the simulated arm is there; 0 for no end", float, 0.0),
        _switch(parser, "--json", "print one JSON object at the end"),
    ]


def _methods(parser: Parser) -> list[str]:
    return [_switch(parser, "--json", "print one JSON object")]


def _doctor(parser: Parser) -> list[str]:
    return [_switch(parser, "--json", "print one JSON object")]


def _weights(parser: Parser) -> list[str]:
    parser.add_argument("action", choices=("pull", "list", "verify"), help="pull fetches, list shows, verify hashes")
    parser.add_argument("name", nargs="?", default=None, help="a bundle (default: mini for pull, all for list and verify)")
    return [_switch(parser, "--json", "print one JSON object")]


def _bench(parser: Parser) -> list[str]:
    parser.add_argument(
        "name", nargs="?", default=None, metavar="NAME", help='a bench, with knobs as in "startup:repeats=3"; none lists them'
    )
    return [
        _switch(parser, "--json", "print one JSON object in place of a table"),
        _switch(parser, "--committed", "print the result kept in the repository instead of running"),
        _switch(parser, "--compile-only", "for the bench of kernels: compile them and run none"),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
