"""From token ids to text that can be shown at once: whole characters only, and nothing that a stop string may still swallow."""

from collections.abc import Callable, Sequence

__all__ = ["Decode", "TextStream"]

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens left out, with no clean-up that depends on what follows."""

_BROKEN = "\ufffd"
# A character has at most four bytes, so at most three can be waiting for the rest.
_WAITING = 3


class TextStream:
    """The text of one request, released token by token. What `push` and `finish` return, joined, is the request's text.

    Bytes of an unfinished character wait for the rest. Where generation ends amid a character, its bytes are released as one
    replacement character (U+FFFD).

    Of several stop strings the one that is complete first ends the text (of those complete at the same character, the longest);
    so the result does not depend on how the text was cut into tokens. Text that may be the beginning of a stop string is held
    until that is decided. Each token costs the decoding of a few ids, however long the text is.
    """

    __slots__ = ("_decode", "_held", "_ids", "_read", "_sent", "_stops", "stopped")

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._held = ""
        # Ids still needed: the last ones that were shown (tokenizers treat a leading space by what came before), then those after.
        self._ids: list[int] = []
        self._read = 0
        self._sent = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token sets free. After a stop string (`stopped`) there is none any more."""
        if self.stopped:
            return ""
        self._ids.append(token)
        fresh = self._fresh()
        whole = self._certain(fresh)
        piece = whole[self._sent :]
        self._sent = max(self._sent, len(whole))
        if fresh and len(whole) == len(fresh):
            self._ids = self._ids[self._read :]
            self._read = len(self._ids)
            self._sent = 0
        return self._release(piece)

    def fork(self) -> "TextStream":
        """Another one that goes on from here by itself."""
        other = TextStream(self._decode, self._stops)
        other._held, other._ids, other._read, other._sent = self._held, list(self._ids), self._read, self._sent
        other.stopped = self.stopped
        return other

    def finish(self) -> str:
        """The text that was still held, when nothing follows."""
        if self.stopped:
            return ""
        fresh = self._fresh()
        whole = self._certain(fresh)
        tail = _BROKEN if len(whole) < len(fresh) else ""
        piece = self._release(whole[self._sent :] + tail)
        rest, self._held = self._held, ""
        return piece + rest

    def _fresh(self) -> str:
        known = self._decode(self._ids[: self._read])
        return self._decode(self._ids)[len(known) :]

    def _certain(self, fresh: str) -> str:
        """The text without the replacement characters at its end that the next bytes may turn into a real one."""
        certain = fresh.rstrip(_BROKEN)
        # Byte by byte a broken run may spoil what it follows, too, so that its length says little: count tokens, of a byte or more.
        if len(self._ids) - self._read <= _WAITING:
            return certain
        return fresh[: max(len(certain), len(fresh) - _WAITING)]

    def _release(self, piece: str) -> str:
        text = self._held + piece
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that a stop string begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
