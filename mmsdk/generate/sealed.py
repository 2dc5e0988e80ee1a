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
processes cannot be forked (`POSSIBLE`), as on Windows: there the library's own limits are all that bounds them. The processes themselves
are those of `mmsdk.generate.forks`.
"""

import ctypes
import json
import os
import socket
from threading import Lock

from mmsdk.generate.forks import STEP, Cell, Vocabulary

__all__ = ["POSSIBLE", "Form", "Place", "checked"]

POSSIBLE = hasattr(os, "fork") and hasattr(socket, "send_fds")


def checked(grammar: str) -> str:
    """What is wrong with a grammar, by the library's words; "" where nothing is. Raises LostError."""
    return Cell(Vocabulary()).told("check", grammar)


class Form:
    """A grammar, compiled in a process: `told` is what is wrong with it, "" where nothing is.

    `bare` is the grammar without the space in front of an answer, by which it is found out whether anything meets it.
    Raises LostError.
    """

    def __init__(self, bare: str, spaced: str, words: Vocabulary) -> None:
        self._grammars, self._words = (bare, spaced), words
        self._lock = Lock()
        self._cell, self.told = self._compile()

    def _compile(self) -> "tuple[Cell, str]":
        cell = Cell(self._words)
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

    def __init__(self, cell: "Cell", number: int, stopped: bool, error: str) -> None:
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
