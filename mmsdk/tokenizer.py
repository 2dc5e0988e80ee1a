"""A tokenizer that is safe with what users type, and between threads: nothing a call does changes it.

What looks like a special token in a text (`<|im_end|>`, `<image>`) is tokenised as the characters it is made of, so that no text can open
a new role or take the place of a picture. Real special tokens are placed by their id, which `special` looks up.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tokenizers import Tokenizer as Backend

from mmsdk.errors import ModelError

__all__ = ["Special", "TextTokenizer"]


_FIRST = '"prepend_scheme":"first"'
# A byte as a token of its own, where a vocabulary has no token for a character.
_SINGLE = re.compile("<0x([0-9A-F]{2})>")


def _byte_letters() -> dict[str, int]:
    """The letters that stand for bytes in vocabularies of bytes: printable ones for themselves, others for those from 256 on (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_LETTERS = _byte_letters()


@dataclass(frozen=True, slots=True)
class Special:
    """A special token: its id, and whether it takes the white space on its left or right with it."""

    id: int
    left: bool = False
    right: bool = False


class TextTokenizer:
    """Ids of ordinary text, and text of ids. Built on a copy: what the given backend is set to later makes no difference.

    `markers` are further contents that a text must never turn into one token, for vocabularies that do not flag their image
    placeholder as special. `specials` are all of them by content; `opening` and `closing` are the ids that the vocabulary asks to be put
    around a text.
    """

    __slots__ = ("_backend", "_bytewise", "_contents", "_ids", "_midway", "closing", "opening", "specials")

    def __init__(self, backend: Backend, markers: Sequence[str] = ()) -> None:
        state = backend.to_str()
        self._backend = _plain(state)
        self._midway = _plain(_going_on(state)) if _FIRST in state else self._backend
        self._bytewise = '"ByteLevel"' in json.dumps(json.loads(state)["decoder"])
        added = self._backend.get_added_tokens_decoder()
        flagged = {token.content: Special(id_, token.lstrip, token.rstrip) for id_, token in added.items() if token.special}
        self.specials = {marker: Special(self.special(marker)) for marker in markers} | flagged
        self._contents = tuple(self.specials)
        self._ids = frozenset(special.id for special in self.specials.values())
        self.opening, self.closing = self._around()

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """Ids of ordinary text; nothing is added, and nothing in it is read as a special token.

        `begins` says that nothing comes before: some vocabularies put a space before the first word of all, and before no other.
        """
        backend = self._backend if begins else self._midway
        ids = list(backend.encode(text, add_special_tokens=False).ids)
        if self._ids.isdisjoint(ids):
            return ids
        # Some vocabularies reach a special token by ordinary merges, or hold it unflagged: break it up where it stands.
        first, *others = self._broken(text)
        parts = [(backend, first), *((self._midway, part) for part in others)]
        return [token for backend, part in parts for token in backend.encode(part, add_special_tokens=False).ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out, spaces as they are."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def spelled(self, id_: int) -> bytes:
        """The bytes that a token adds to a text, which may be a part of a character; of a special token none.

        Those of all tokens of a text, joined, are the text; of some vocabularies with a space before its first word.
        """
        token = self._backend.id_to_token(id_)
        if token is None or id_ in self._ids:
            return b""
        if self._bytewise and all(letter in _LETTERS for letter in token):
            return bytes(_LETTERS[letter] for letter in token)
        if not self._bytewise and (single := _SINGLE.fullmatch(token)):
            return bytes.fromhex(single[1])
        # behind another one: some vocabularies drop the space of the first
        before = self._backend.encode("a", add_special_tokens=False).ids
        known = self._backend.decode(before, skip_special_tokens=True)
        return self._backend.decode([*before, id_], skip_special_tokens=True)[len(known) :].encode()

    def to_json(self) -> str:
        """The vocabulary and its rules, in the format of `tokenizer.json`."""
        return str(self._backend.to_str())

    def special(self, content: str) -> int:
        """The id of a special token. Raises ModelError where the vocabulary has none of that name."""
        found = self._backend.token_to_id(content)
        if found is None:
            raise ModelError(f"the tokenizer has no token {content!r}")
        return found

    def fit(self, rows: int, where: str) -> None:
        """Raises ModelError, beginning with `where`, for an embedding of fewer rows than there are ids: its first such word would fail."""
        last = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if last >= rows:
            raise ModelError(f"{where} has {rows} rows, but the ids of its tokenizer go up to {last}")

    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What is put before and behind a text, seen at a letter."""
        plain, whole = (self._backend.encode("a", add_special_tokens=added).ids for added in (False, True))
        size = len(plain)
        starts = [start for start in range(len(whole) - size + 1) if whole[start : start + size] == plain]
        start = starts[0] if starts and size else len(whole)
        return tuple(whole[:start]), tuple(whole[start + size :])

    def _broken(self, text: str) -> list[str]:
        starts = {place for content in self._contents if len(content) > 1 for place in _places(text, content)}
        cuts = [0, *sorted(start + 1 for start in starts), len(text)]
        return [text[start:end] for start, end in pairwise(cuts)]


def _plain(state: str) -> Backend:
    """A backend that reads nothing as special and neither cuts nor pads."""
    backend = Backend.from_str(state)
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    return backend


def _going_on(state: str) -> str:
    """The same vocabulary for text that something stands before: without the space that the very first word is given."""
    values = json.loads(state)
    outer = values["pre_tokenizer"] or {}
    for part in outer.get("pretokenizers", [outer]):
        if part.get("prepend_scheme") == "first":
            part["prepend_scheme"] = "never"
    return json.dumps(values)


def _places(text: str, content: str) -> Iterator[int]:
    place = text.find(content)
    while place >= 0:
        yield place
        place = text.find(content, place + 1)
