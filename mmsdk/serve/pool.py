"""What an engine wants of the memory for its requests; `mmsdk.serve.pools` has the four there are."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from mmsdk.kv.types import KVCache

__all__ = ["Pool"]


@runtime_checkable
class Pool(Protocol):
    """Memory for the requests of one engine. Caches of one pool hold the rows of one request each, or, `joined`, of those who speak."""

    @property
    def tokens(self) -> int:
        """The most that one request may take, prompt and answer."""
        ...

    @property
    def rereads(self) -> bool:
        """Whether what was freed is the same when it is read again."""
        ...

    @property
    def page(self) -> int:
        """Tokens of a block that is found again by its key; 0 where none is."""
        ...

    @property
    def most(self) -> int:
        """Tokens of a prompt that go through the decoder at one time, at most."""
        ...

    def pieces(self, length: int) -> tuple[range, ...]:
        """The tokens of a prompt that go through the decoder at one time; none where any do."""
        ...

    def known(self, keys: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, are there already."""
        ...

    def begin(
        self, keys: Sequence[bytes], tokens: int, upto: int, ahead: Sequence[int], caches: Sequence[KVCache]
    ) -> tuple[tuple[KVCache, int], ...]:
        """A cache for a prompt of so many tokens, and how many it knows by their keys; nothing where there is no room.

        There is room where `upto` tokens of it fit beside the `caches` that are there, each of which may take so many more (`ahead`); for
        one that is alone there always is.
        """
        ...

    def learn(self, cache: KVCache, keys: Sequence[bytes]) -> None:
        """A prompt has been read."""
        ...

    def goes_on(self, cache: KVCache) -> bool:
        """Whether there is room for a token of everyone who speaks. What is only remembered makes room."""
        ...

    def empty(self) -> KVCache:
        """What stands for those who speak where nobody does."""
        ...

    def joined(self, caches: Sequence[KVCache]) -> KVCache:
        """The rows of all of them, which are not to be used any more."""
        ...

    def picked(self, cache: KVCache, rows: Sequence[int]) -> KVCache:
        """These rows, any number of times; what the others held is free, and the cache not to be used any more."""
        ...

    def release(self, cache: KVCache) -> None:
        """Free what it holds."""
        ...

    def clear(self) -> None:
        """Forget what is only remembered."""
        ...

    def held(self, caches: Sequence[KVCache]) -> int:
        """Blocks that requests hold, over all layers."""
        ...
