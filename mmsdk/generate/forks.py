"""Processes that compile and follow forms: one for each form, forked from one that knows the vocabulary, and ended where it costs too much.

    cell = Cell(Vocabulary(text, v, ends))
    cell.told("compile", bare, spaced)      # "" where nothing is wrong
    reply = cell.order(STEP, "mask", number)

What they run is `mmsdk.generate.cell`; why they are processes is told in `mmsdk.generate.sealed`.
"""

import atexit
import json
import os
import socket
import subprocess
import sys
import weakref
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any

from mmsdk.errors import ModelError

__all__ = ["COMPILING", "COSTLY", "LIMITS", "LOST", "STEP", "Cell", "LostError", "Vocabulary"]

COMPILING, STEP = 4.0, 0.5
ROOM = 128 * 2**20
# Of the library's limits, those that are lower here: 2 kB are held for each state of the lexer.
LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}
COSTLY = "it costs too much"
LOST = "the process in which the form is followed was lost"
_STARTING = 60.0
# How long to wait for so many seconds of the processor's time, where others have it, too.
_WAIT, _MORE = 4.0, 5.0
_LATE = b""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the library is told of a tokenizer: its `tokenizer.json`, how many words scores have, and the ids that end a text."""

    text: str = ""
    v: int = 0
    ends: tuple[int, ...] = ()


class LostError(ModelError):
    """The process of a form ended, or was not had, by no fault of the form's; ask again."""


class Cell:
    """One process of a form's. It ends when this is let go of. Raises LostError where it cannot be had."""

    def __init__(self, words: Vocabulary) -> None:
        self.over = deque[int]()
        self.why = ""
        self._count, self._lock, self._owner = 0, Lock(), os.getpid()
        try:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                first(words).fork(theirs)
                self._asked = Connection(ours.detach())
        except OSError as error:
            raise LostError(f"{LOST}: it cannot be begun ({error}); ask again") from error

    @property
    def gone(self) -> bool:
        """Whether it obeys nobody here any more."""
        return bool(self.why) or self._owner != os.getpid()

    def number(self) -> int:
        """One that no other place has."""
        with self._lock:
            self._count += 1
            return self._count

    def told(self, name: str, *grammars: str) -> str:
        """What is wrong with grammars, "" where nothing is, by the first order there is. Raises LostError."""
        reply = self.order(COMPILING, name, 0, *grammars)
        if reply is not None:
            return str(json.loads(reply))
        if self.why.startswith(LOST):
            raise LostError(self.why)
        return self.why

    def order(self, seconds: float, name: str, number: int, *given: Any) -> bytes | None:
        """What comes back; None where the process ended over it, or before, and `why` then says why."""
        with self._lock:
            if self._owner != os.getpid():
                # two would speak at one time
                self.why = f"{LOST}: the program was forked amid an answer; ask again"
            if self.why:
                return None
            over = [self.over.popleft() for _ in range(len(self.over))]
            try:
                reply = self._reply({"seconds": seconds, "over": over, "order": [name, number, *given]}, _WAIT * seconds + _MORE)
            except BaseException:
                # a reply to this order that came later would be taken for one to the next
                self._end(f"{LOST}: it was interrupted; ask again")
                raise
            if reply.startswith(b"="):
                return reply[1:]
            if reply == _LATE:
                self._end(f"{LOST}: this machine has too much to do; ask again")
            elif reply == b"-":
                self._end(f"{LOST}: it ended; ask again")
            else:
                self._end(f"{COSTLY}: more than {seconds:g} s of the processor's time, or {ROOM // 2**20} MiB; make it simpler")
            return None

    def _reply(self, order: dict[str, Any], wait: float) -> bytes:
        try:
            self._asked.send_bytes(json.dumps(order).encode())
            return self._asked.recv_bytes() if self._asked.poll(wait) else _LATE
        except (EOFError, OSError):
            return b"-"

    def _end(self, why: str) -> None:
        self.why = why
        self._asked.close()


class First:
    """The process that knows a vocabulary, of which those of the forms are copies."""

    def __init__(self, words: Vocabulary) -> None:
        door, theirs = socket.socketpair()
        command = [sys.executable, "-P", str(Path(__file__).with_name("cell.py")), str(theirs.fileno())]
        with theirs:
            try:
                # of a session of its own: Ctrl-C is for this process, which ends the other one by ending
                process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )  # fmt: skip
            except BaseException:
                door.close()
                raise
        self._door, self._process = door, process
        # not by __del__, which is called where the lines above raised, too; at exit the cache below is cleared
        weakref.finalize(self, _end, door, process).atexit = False
        told = {"tokenizer": words.text, "v": words.v, "ends": words.ends, "limits": LIMITS, "room": ROOM}
        with Connection(os.dup(self._door.fileno())) as talk:
            try:
                talk.send_bytes(json.dumps(told).encode())
                wrong = json.loads(talk.recv_bytes()) if talk.poll(_STARTING) else f"not within {_STARTING:g} s"
            except (EOFError, OSError):
                raise LostError(f"the process in which forms are followed did not start ({' '.join(command[:3])}); ask again") from None
        if wrong:
            raise ModelError(f"answers in a form cannot be had of this model, whose vocabulary llguidance does not read: {wrong}")

    @property
    def well(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def fork(self, theirs: socket.socket) -> None:
        """Have a copy made that obeys what comes from the other end of this socket."""
        socket.send_fds(self._door, [b"."], [theirs.fileno()])


def _end(door: socket.socket, process: subprocess.Popen[bytes]) -> None:
    door.close()
    # it ends by itself; waited for, so that the system forgets it
    process.wait()


_STARTED = Lock()


def first(words: Vocabulary) -> First:
    with _STARTED:
        found = begun(words, os.getpid())
        if not found.well:
            begun.cache_clear()
            found = begun(words, os.getpid())
        return found


@lru_cache(maxsize=5)
def begun(words: Vocabulary, process: int) -> First:
    """Of this process: one that it was forked from has its own."""
    return First(words)


# before the interpreter takes itself apart
atexit.register(begun.cache_clear)
