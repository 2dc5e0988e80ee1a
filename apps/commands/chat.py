"""`mmsdk chat [PATH...]`: a conversation, line by line, at a terminal or from a pipe; each answer as text, or as one JSON object a line.

A line is a question, or begins with one of these; "//" begins a question with a slash.

    /image PATH    a picture or a clip that goes with the next question
    /undo          forget the last question and its answer
    /system TEXT   tell the model this before the conversation; without a text, nothing
    /quit          end, as the end of the input does

Ctrl-C while an answer is said stops it, at a terminal, and the question was then never asked; anywhere else it ends the command.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module

from mmsdk.answer import Answer
from mmsdk.apps.adapters import adapted
from mmsdk.apps.answers import as_json, config_of, tell_notes
from mmsdk.apps.arguments import near
from mmsdk.apps.console import busy
from mmsdk.chat import Chat
from mmsdk.errors import InputError, MmsdkError, ModelError
from mmsdk.legibility import LegibilityWarning
from mmsdk.models.types import VLM
from mmsdk.pipeline import pipeline
from mmsdk.vision.intake import check, load
from mmsdk.vision.types import Media

__all__ = ["run"]

COMMANDS = ("/image", "/undo", "/system", "/quit")


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends. A line that cannot be answered is told, and the next one is read; 2 at the end where there was any."""
    config = config_of(args)
    for path in args.words:
        check(path)
    shown, steps = [load(path) for path in args.words], args.compress or "identity"
    with busy(f"loading {args.model}"):
        pipe = pipeline(
            model=args.model, compress=steps, dtype=args.dtype, device=args.device, quantize=args.quantize, kv=args.kv,
            gguf_file=args.gguf_file, progress=not args.json,
        )  # fmt: skip
        worn = adapted(pipe, args.adapter)
    warnings.simplefilter("ignore", LegibilityWarning)  # in the notes of the answer, too
    talk, failed = _Talk(pipe.chat(args.system, config, adapter=worn), pipe.vlm, shown, args.json), False
    for line in _lines():
        try:
            if not talk.take(line.strip()):
                break
        except (InputError, ModelError) as error:
            talk.refuse(error)
            failed = True
    return 2 if failed and not _interactive() else 0


class _Talk:
    """A conversation, and what has been shown since the last question."""

    def __init__(self, chat: Chat, vlm: VLM, shown: list[Media], as_objects: bool) -> None:
        self._chat, self._vlm, self._shown, self._as_objects = chat, vlm, shown, as_objects

    def take(self, line: str) -> bool:
        """Do what a line says; whether to go on. Raises InputError, and ModelError, for what cannot be done."""
        if not line.startswith("/") or line.startswith("//"):
            if line:
                self._ask(line.removeprefix("/") if line.startswith("//") else line)
            return True
        name, _, rest = line.partition(" ")
        if name == "/image":
            self._show(rest.strip())
        elif name == "/undo":
            _note(f"forgotten: {self._chat.undo().question}")
        elif name == "/system":
            self._chat.system = rest.strip()
        elif name != "/quit":
            raise InputError(f"there is no such command{near(name, COMMANDS)}", item=name)
        return name != "/quit"

    def refuse(self, error: MmsdkError) -> None:
        """Tell what is wrong with a line."""
        print(f"mmsdk: {error}", file=sys.stderr)
        if self._as_objects:
            item = error.item if isinstance(error, InputError) else ""
            print(json.dumps({"error": {"type": type(error).__name__, "message": str(error), "item": item}}), flush=True)

    def _show(self, path: str) -> None:
        if not path:
            raise InputError("write the path of a picture or a clip behind it", item="/image")
        check(path)
        self._shown.append(load(path))
        _note(f"{path} goes with the next question")

    def _ask(self, question: str) -> None:
        """Answer a question; what was shown stays for the next one where that fails."""
        try:
            answer = self._answered(question)
        except KeyboardInterrupt:
            if not _interactive():
                raise
            _note("stopped; the question is forgotten")
            return
        self._shown.clear()
        tell_notes(answer)
        if self._as_objects:
            print(json.dumps(as_json(answer, self._vlm.name, self._vlm.tokenizer)), flush=True)

    def _answered(self, question: str) -> Answer:
        if self._as_objects:
            return self._chat(self._shown, question)
        pieces = self._chat.stream(self._shown, question)
        try:
            for piece in pieces:
                print(piece, end="", flush=True)
        finally:
            print(flush=True)
        return pieces.answer


def _interactive() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _lines() -> Iterator[str]:
    """The lines of the input, asked for where somebody types them. Ctrl-C there is no line, and ends all."""
    if not _interactive():
        # not `yield from`, which would close it where the conversation ends before
        for line in sys.stdin or ():
            yield line
        return
    # what is typed can be edited then, where Python was built with it
    with suppress(ImportError):
        import_module("readline")
    _note(f"ask; there is also {', '.join(COMMANDS)}")
    while True:
        try:
            line = input("> ")
        except EOFError:
            print(file=sys.stderr)
            return
        yield line


def _note(text: str) -> None:
    """A word for whoever types; nothing in a pipe."""
    if _interactive():
        print(f"({text})", file=sys.stderr, flush=True)
