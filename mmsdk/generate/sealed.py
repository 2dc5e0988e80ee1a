"""JSON schemas compiled and followed in processes of their own, which can be ended: what they take is bounded, whatever they say.

    form = Form(grammar, spaced, Vocabulary(text, v, ends))
    guide = form.deep_copy()

The library bounds what it does by counting, but it counts between pieces of work. One piece, the derivative of several regular expressions
that must match together (`allOf`, `$ref` beside `pattern`, ...), grows exponentially with their number, while a schema is compiled and
while it is followed: 39 short ones take gigabytes, and cannot be interrupted. So each form has a process (`mmsdk.generate.cell`), forked
from one that knows the vocabulary, in which an order may take `COMPILING` or `STEP` seconds of the processor's time, and all that it holds
`ROOM` bytes; what goes over ends that process, and the answers that are in this form, and nothing else. Where a process ends otherwise, as
by the system that has no memory left, the form is not at fault: that is a `LostError`, and whoever asks again has another process.

Regular expressions and choices, in which at most two expressions meet, one of them ours, stay in this process. So do schemas where
processes cannot be forked (`POSSIBLE`), as on Windows: there the library's own limits are all that bounds them.
"""

import atexit
import ctypes
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

__all__ = ["COSTLY", "LIMITS", "LOST", "POSSIBLE", "Form", "LostError", "Place", "Vocabulary", "checked"]

POSSIBLE = hasattr(os, "fork") and hasattr(socket, "send_fds")
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


def checked(grammar: str) -> str:
    """What is wrong with a grammar, by the library's words; "" where nothing is. Raises LostError."""
    return _Cell(Vocabulary()).told("check", grammar)


class Form:
    """A grammar, compiled in a process: `told` is what is wrong with it, "" where nothing is.

    `bare` is the grammar without the space in front of an answer, by which it is found out whether anything meets it.
    Raises LostError.
    """

    def __init__(self, bare: str, spaced: str, words: Vocabulary) -> None:
        self._grammars, self._words = (bare, spaced), words
        self._lock = Lock()
        self._cell, self.told = self._compile()

    def _compile(self) -> "tuple[_Cell, str]":
        cell = _Cell(self._words)
        return cell, cell.told("compile", *self._grammars)

    def deep_copy(self) -> "Place":
        """A place at the beginning. Where the process has ended, or is that of a program this one was forked from, another one is begun.

        What goes wrong with that is this answer's alone: the next one tries again. Raises LostError.
        """
        with self._lock:
            if self.told or not self._cell.gone:
                place = Place(self._cell, 0, False, self.told).deep_copy()
                if self.told or not self._cell.gone:
                    return place
            cell, told = self._compile()
            if not told:
                self._cell = cell
            return Place(cell, 0, False, told).deep_copy()


class Place:
    """Where one answer stands; what `llguidance.LLMatcher` tells of it, by the same names."""

    def __init__(self, cell: "_Cell", number: int, stopped: bool, error: str) -> None:
        self._cell, self._number, self._stopped, self._error = cell, number, stopped, error

    def __del__(self) -> None:
        # told with the next order: this may run amid another one
        if self._number:
            self._cell.over.append(self._number)

    def deep_copy(self) -> "Place":
        """Another one that goes on from here by itself."""
        number = self._cell.number()
        other = Place(self._cell, number, self._stopped, self._error)
        if not self._error:
            other._note(self._cell.order(STEP, "copy", self._number, number))
        return other

    def consume_token(self, token: int) -> None:
        """Go on by a token."""
        if not self._error:
            self._note(self._cell.order(STEP, "push", self._number, token))

    def unsafe_compute_mask_ptr(self, place: int, size: int) -> None:
        """Write which tokens may come next, a bit each, into so many bytes; where there is an error, they are left as they are."""
        mask = None if self._error else self._cell.order(STEP, "mask", self._number)
        if mask is None:
            self._note(None)
        else:
            ctypes.memmove(place, mask, min(size, len(mask)))

    def is_stopped(self) -> bool:
        """Whether nothing can follow."""
        return self._stopped

    def is_error(self) -> bool:
        """Whether it cannot be followed further."""
        return bool(self._error)

    def get_error(self) -> str:
        """Why not."""
        return self._error

    def _note(self, told: bytes | None) -> None:
        if told is not None:
            self._stopped, self._error = json.loads(told)
        elif not self._error:
            self._stopped, self._error = True, self._cell.why


class _Cell:
    """One process of a form's. It ends when this is let go of. Raises LostError where it cannot be had."""

    def __init__(self, words: Vocabulary) -> None:
        self.over = deque[int]()
        self.why = ""
        self._count, self._lock, self._owner = 0, Lock(), os.getpid()
        try:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                _first(words).fork(theirs)
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


class _First:
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


def _first(words: Vocabulary) -> _First:
    with _STARTED:
        found = _begun(words, os.getpid())
        if not found.well:
            _begun.cache_clear()
            found = _begun(words, os.getpid())
        return found


@lru_cache(maxsize=5)
def _begun(words: Vocabulary, process: int) -> _First:
    """Of this process: one that it was forked from has its own."""
    return _First(words)


# before the interpreter takes itself apart
atexit.register(_begun.cache_clear)
