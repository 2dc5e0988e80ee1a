"""A conversation as lines of text: what each of them asks for, and what is answered to it, for a person or as JSON."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from mmsdk.answer import Answer
from mmsdk.answering import Stream
from mmsdk.apps.answers import Form, as_json, check_shown, tell_notes
from mmsdk.apps.parser import near
from mmsdk.chat import Chat, Exchange
from mmsdk.errors import InputError, MmsdkError
from mmsdk.models.types import VLM
from mmsdk.vision.intake import load, load_video
from mmsdk.vision.types import Media
from mmsdk.vision.values import cause

__all__ = ["HELP", "Talk", "note", "typed"]

HELP = """\
A line is a question, or begins with one of these; "//" begins a question with a slash.

  /image PATH        a picture or a clip that goes with the next question
  /video PATH        the same, as a clip even where it is an animated picture
  /turns             what was asked and answered, with its numbers
  /edit N QUESTION   ask turn N in other words, about what was shown with it; the turns behind it are gone
  /drop N            take turn N out; what was said after it stays as it was said
  /undo              take the last turn out
  /system TEXT       tell the model this before the conversation; without a text, nothing
  /schema FILE       from now on, answers are JSON of the JSON Schema in this file
  /regex REGEX       from now on, answers are matched whole by this regular expression
  /choice A,B,...    from now on, answers are one of these
  /free              answers may be anything again
  /save FILE         write the conversation into a new file, as JSON
  /help              this list
  /quit              end, as the end of the input does

Turns count from 1, and from the end as -1, -2, ... Ctrl-C stops an answer, and its question was then never
asked; at the prompt it takes away a line that is half typed, and at an empty one it ends."""


@dataclass(slots=True)
class Talk:
    """A conversation, and what was shown since the last question. `as_objects` tells in JSON, one object a line."""

    chat: Chat
    vlm: VLM
    as_objects: bool
    shown: list[Media] = field(default_factory=list)
    _saved: set[Path] = field(default_factory=set)

    def take(self, line: str) -> bool:
        """Do what a line says; whether to go on. Raises InputError, and ModelError, for what cannot be done; all is then as it was."""
        if not line.startswith("/") or line.startswith("//"):
            if line:
                self._ask(line.removeprefix("/") if line.startswith("//") else line)
            return True
        name, _, rest = line.partition(" ")
        if name == "/quit":
            return False
        commands: dict[str, Callable[[str], None]] = {
            "/image": lambda path: self._show(name, path),
            "/video": lambda path: self._show(name, path),
            "/turns": lambda _: self._list(),
            "/edit": self._edit,
            "/drop": lambda number: self._forgotten(self.chat.drop(self._place(number))),
            "/undo": lambda _: self._forgotten(self.chat.undo()),
            "/system": self._tell,
            "/schema": lambda file: self._form(name, Form.of(schema=file), file),
            "/regex": lambda regex: self._form(name, Form.of(regex=regex), regex),
            "/choice": lambda words: self._form(name, Form.of(choice=words), words),
            "/free": lambda _: self._form(name, Form(), "anything"),
            "/save": self._save,
            "/help": lambda _: print(HELP, file=sys.stderr),
        }
        if name not in commands:
            raise InputError(f"there is no such command{near(name, (*commands, '/quit'))}", item=name)
        commands[name](rest.strip())
        return True

    def refuse(self, error: MmsdkError) -> None:
        """Tell what is wrong with a line."""
        print(f"mmsdk: {error}", file=sys.stderr)
        if self.as_objects:
            item = error.item if isinstance(error, InputError) else ""
            print(json.dumps({"error": {"type": type(error).__name__, "message": str(error), "item": item}}), flush=True)

    def _ask(self, question: str) -> None:
        """Answer a question; what was shown stays for the next one where that fails, or is stopped."""
        self._say(self.chat.stream(self.shown, question))
        self.shown.clear()

    def _edit(self, words: str) -> None:
        number, _, question = words.partition(" ")
        self._say(self.chat.stream_edit(self._place(number), question.strip()))

    def _say(self, pieces: Stream) -> None:
        answer = pieces.answer if self.as_objects else _printed(pieces)
        tell_notes(answer, "/video reads them all")
        if self.as_objects:
            print(json.dumps(as_json(answer, self.vlm.name, self.vlm.tokenizer, self.chat.config)), flush=True)

    def _show(self, name: str, path: str) -> None:
        if not path:
            raise InputError("write the path of a picture or a clip behind it", item=name)
        check_shown(path)
        self.shown.append(load_video(path) if name == "/video" else load(path))
        note(f"{path} goes with the next question")

    def _tell(self, words: str) -> None:
        self.chat.system = words
        note("told before the conversation" if words else "nothing is told before the conversation")

    def _form(self, name: str, form: Form, words: str) -> None:
        if not words:
            raise InputError("write behind it what answers are to be, or /free", item=name)
        self.chat.config = replace(self.chat.config, constraint=form.constraint)
        note(f"answers from now on: {words}")

    def _place(self, number: str) -> int:
        """The place of a turn, whose number counts from 1 or from the end. Raises InputError for what is no number of one."""
        count = len(self.chat.turns)
        try:
            place = int(number)
        except ValueError:
            raise InputError(f"{number!r} is no number of a turn; /turns lists them", item="turn") from None
        if not count:
            raise InputError("nothing was asked yet", item="turn")
        if place == 0 or abs(place) > count:
            told = "there is one, and it is turn 1" if count == 1 else f"they are 1 to {count}"
            raise InputError(f"there is no turn {place}; {told}, and -1 is the last one", item="turn")
        return place - 1 if place > 0 else place

    def _forgotten(self, turn: Exchange) -> None:
        note(f"forgotten: {turn.question}")

    def _list(self) -> None:
        turns = self._told()["turns"]
        assert isinstance(turns, list), "as it is made below"
        if self.as_objects:
            print(json.dumps({"turns": turns}), flush=True)
            return
        if not turns:
            note("nothing was asked yet")
        for number, turn in enumerate(turns, 1):
            shown = f" [{', '.join(turn['shown'])}]" if turn["shown"] else ""
            print(f"{number}{shown} {turn['question']}\n  {turn['answer']}", flush=True)

    def _save(self, path: str) -> None:
        """Raises InputError for a file that cannot be written, or that was there before this conversation."""
        if not path:
            raise InputError("write the path of a file behind it", item="/save")
        file = Path(path)
        if os.path.lexists(file) and file.absolute() not in self._saved:
            raise InputError("there is such a file already; name another one", item=path)
        try:
            _written(file, json.dumps(self._told(), indent=2))
        except (OSError, ValueError) as error:
            # it is written beside, by another name
            raise InputError(f"it cannot be written: {cause(error)}", item=path) from None
        self._saved.add(file.absolute())
        note(f"{len(self.chat.turns)} turns are in {path}")

    def _told(self) -> dict[str, object]:
        turns = [
            {"shown": [one.source for one in turn.asked.media], "question": turn.question, "answer": str(turn.answer)}
            for turn in self.chat.turns
        ]
        return {"model": self.vlm.name, "system": self.chat.system, "turns": turns}


def _written(file: Path, text: str) -> None:
    """A file with this text, whole or not at all: it is written beside and then moved. Raises OSError and ValueError as the disk does."""
    beside = file.with_name(f".{file.name}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)


def typed() -> bool:
    """Whether somebody types the lines."""
    return sys.stdin is not None and sys.stdin.isatty()


def note(text: str) -> None:
    """What a line has done, beside the answers."""
    print(f"({text})", file=sys.stderr, flush=True)


def _printed(pieces: Stream) -> Answer:
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    finally:
        print(flush=True)
    return pieces.answer
