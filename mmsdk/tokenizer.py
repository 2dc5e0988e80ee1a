"""A tokenizer that is safe with what users type, and between threads: nothing a call does changes it.

What looks like a special token in a text (`<|im_end|>`, `<image>`) is tokenised as the characters it is made of, so that no text can open
a new role or take the place of a picture. Real special tokens are placed by their id, which `special` looks up.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from tokenizers import Tokenizer as Backend

from mmsdk.errors import ModelError

__all__ = ["TextTokenizer"]


class TextTokenizer:
    """Ids of ordinary text, and text of ids. Built on a copy: what the given backend is set to later makes no difference.

    `markers` are further contents that a text must never turn into one token, for vocabularies that do not flag their image
    placeholder as special.
    """

    __slots__ = ("_backend", "_contents", "_ids")

    def __init__(self, backend: Backend, markers: Sequence[str] = ()) -> None:
        self._backend = Backend.from_str(backend.to_str())
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        special = {token.content: id_ for id_, token in self._backend.get_added_tokens_decoder().items() if token.special}
        guarded = special | {marker: self.special(marker) for marker in markers}
        self._contents = tuple(guarded)
        self._ids = frozenset(guarded.values())

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text; nothing is added, and nothing in it is read as a special token."""
        ids = list(self._backend.encode(text, add_special_tokens=False).ids)
        if self._ids.isdisjoint(ids):
            return ids
        # Some vocabularies reach a special token by ordinary merges, or hold it unflagged: break it up where it stands.
        return [token for part in self._broken(text) for token in self._backend.encode(part, add_special_tokens=False).ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out, spaces as they are."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

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

    def _broken(self, text: str) -> list[str]:
        starts = {place for content in self._contents if len(content) > 1 for place in _places(text, content)}
        cuts = [0, *sorted(start + 1 for start in starts), len(text)]
        return [text[start:end] for start, end in pairwise(cuts)]


def _places(text: str, content: str) -> Iterator[int]:
    place = text.find(content)
    while place >= 0:
        yield place
        place = text.find(content, place + 1)
