"""Blocks by what they hold, so that a prompt that begins as an earlier one does finds its keys and values there.

A block's key is a digest of all that its keys and values depend on: the root (model, precision, tenant), then everything in front of it,
then its own tokens. Words count by their ids, a visual token by the key of its input and its place in it. An equal key means equal
content; a picture of other pixels, other compression or another tenant has another one, from its first block on.

Only full blocks of prompts are kept. They stay until room is wanted, the longest unused first, and of one prompt its end first.
"""

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from mmsdk.kv.blocks import Blocks

__all__ = ["Look", "Prefixes", "Run", "Words", "chain", "digest", "onward"]

# 256 bits: nobody finds two contents of one key, not even who tries.
_BYTES = 32


@dataclass(frozen=True, slots=True)
class Words:
    """A run of token ids."""

    ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def told(self, start: int, stop: int) -> bytes:
        """What part of it says."""
        return struct.pack(f"<{stop - start}q", *self.ids[start:stop])


@dataclass(frozen=True, slots=True)
class Look:
    """The tokens of one visual input: `key` says what they were made of, and how."""

    key: bytes
    count: int

    def __len__(self) -> int:
        return self.count

    def told(self, start: int, stop: int) -> bytes:
        """What part of it says."""
        return digest(self.key, struct.pack("<2q", start, stop))


Run = Words | Look


def digest(*parts: bytes) -> bytes:
    """One digest of several parts, none of which can be taken for another's end."""
    found = hashlib.blake2b(digest_size=_BYTES)
    for part in parts:
        found.update(struct.pack("<q", len(part)))
        found.update(part)
    return found.digest()


def chain(root: bytes, runs: Sequence[Run], page: int) -> list[bytes]:
    """The key of every full block of a prompt, in order."""
    return _linked(digest(root), runs, page)


def onward(key: bytes, ids: Sequence[int]) -> list[bytes]:
    """The keys of words behind that of the last token, in blocks of one token."""
    return _linked(key, [Words(tuple(ids))], 1)


def _linked(key: bytes, runs: Sequence[Run], page: int) -> list[bytes]:
    keys, said, filled = list[bytes](), list[bytes](), 0
    for run in runs:
        start = 0
        while start < len(run):
            stop = min(len(run), start + page - filled)
            said += [type(run).__name__.encode(), run.told(start, stop)]
            filled, start = filled + stop - start, stop
            if filled == page:
                key = digest(key, *said)
                keys.append(key)
                said, filled = [], 0
    return keys


class Prefixes:
    """The columns of kept blocks by key, held once in all layers for as long as they are kept."""

    def __init__(self, blocks: Blocks, layers: int) -> None:
        self._blocks = blocks
        self._layers = range(layers)
        self._columns: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def idle(self) -> int:
        """Kept blocks that nobody else holds, over all layers."""
        return self._blocks.idle

    def known(self, keys: Sequence[bytes]) -> int:
        """How many blocks of a prompt are kept, from the first on."""
        return next((place for place, key in enumerate(keys) if key not in self._columns), len(keys))

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The columns of the longest beginning that is kept; whoever wants them holds them before anything else is kept or let go of."""
        found = list[int]()
        for key in keys:
            if key not in self._columns:
                break
            found.append(self._columns[key])
        self._used(keys[: len(found)])
        return found

    def learn(self, keys: Sequence[bytes], columns: Sequence[int]) -> None:
        """Keep blocks that a cache holds; of a key that is kept already, the block that is."""
        for key, column in zip(keys, columns, strict=False):
            if key not in self._columns:
                self._blocks.hold(self._layers, [column])
                self._blocks.keep(column, True)
                self._columns[key] = column
        self._used(keys)

    def evict(self, count: int) -> None:
        """Let go of kept blocks, the longest unused first, until so many columns are free or none is left that nobody else holds."""
        for key, column in list(self._columns.items()):
            if self._blocks.free(self._layers) >= count:
                return
            if not self._blocks.shared(self._layers, column):
                self._give(key)

    def clear(self) -> None:
        """Let go of all."""
        for key in list(self._columns):
            self._give(key)

    def _give(self, key: bytes) -> None:
        column = self._columns.pop(key)
        self._blocks.keep(column, False)
        self._blocks.give(self._layers, [column])

    def _used(self, keys: Sequence[bytes]) -> None:
        # The end of a prompt before its beginning: without it the end could not be found.
        for key in reversed(keys):
            self._columns.move_to_end(key)
