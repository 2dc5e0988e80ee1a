"""`mmsdk chat [PATH...]`: a conversation, line by line, at a terminal or from a pipe; each answer as text, or as one JSON object a line.

What a line may say is told by /help (`mmsdk.apps.talk`). At a terminal, Ctrl-C stops what a line began, the conversation is as it was
before it; a line that is half typed it takes away, and at an empty one it ends the command, as from a pipe it always does. A line that is
no text is an error of its own.
"""

import argparse
import io
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module

from mmsdk.apps.adapters import adapted
from mmsdk.apps.answers import check_shown, config_of, form_of
from mmsdk.apps.console import busy
from mmsdk.apps.talk import Talk, note, typed
from mmsdk.errors import InputError, ModelError
from mmsdk.legibility import LegibilityWarning
from mmsdk.pipeline import pipeline
from mmsdk.vision.intake import load

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends. A line that cannot be answered is told, and the next one is read; 2 at the end where there was any."""
    config = config_of(args, form_of(args))
    for path in args.words:
        check_shown(path)
    shown, steps = [load(path) for path in args.words], args.compress or "identity"
    with busy(f"loading {args.model}"):
        pipe = pipeline(
            model=args.model, compress=steps, dtype=args.dtype, device=args.device, quantize=args.quantize, kv=args.kv,
            gguf_file=args.gguf_file, progress=not args.json,
        )  # fmt: skip
        worn = adapted(pipe, args.adapter)
    warnings.simplefilter("ignore", LegibilityWarning)  # in the notes of the answer, too
    return _talked(Talk(pipe.chat(args.system, config, adapter=worn), pipe.vlm, args.json, shown))


def _talked(talk: Talk) -> int:
    failed = False
    for line in _lines():
        try:
            if not talk.take(line.strip()):
                break
        except (InputError, ModelError) as error:
            talk.refuse(error)
            failed = True
        except KeyboardInterrupt:
            if not typed():
                raise
            note("stopped; the conversation is as it was")
    return 2 if failed and not typed() else 0


def _lines() -> Iterator[str]:
    """The lines of the input, asked for where somebody types them. Ctrl-C takes a line away that was begun, and where none was ends all."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        # one line in another encoding is one error, and not the end of all; a path may have such letters
        sys.stdin.reconfigure(errors="surrogateescape")
    if not typed():
        # not `yield from`, which would close it where the conversation ends before
        for line in sys.stdin or ():
            yield line
        return
    # what is typed can be edited then, where Python was built with it
    with suppress(ImportError):
        import_module("readline")
    note("ask; /help says what else there is")
    while True:
        try:
            line = input("> ")
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            if not _begun():
                raise
            print(file=sys.stderr)
            continue
        yield line


def _begun() -> bool:
    """Whether something stands in the line that is typed; where Python was built without a way to edit it, nobody knows."""
    with suppress(ImportError):
        return bool(import_module("readline").get_line_buffer())
    return False
