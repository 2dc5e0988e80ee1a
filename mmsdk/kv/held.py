"""The cache of one conversation, kept from turn to turn, in memories that remember nothing by themselves.

    memory = HeldMemory()
    cache, known = memory.begin(shape, capacities, keys)    # what this prompt and the last one begin with is in it already
    memory.learn(cache, keys)
    memory.said(ids)                                        # and what was answered, once it has been

A prompt that goes on where the last answer ended finds all of it; one in which something was changed finds what stands before that: the
cache is cut back to there, to the token. What lies behind that is written over, so that it does not matter how an answer ended: what is
left is what it would be had nothing come behind it. A memory of levels goes back to the end of a prompt that it has read, the last one that
the new one begins with. Blocks in fewer bits cannot be cut back so: see `mmsdk.kv.held_rounded`.
"""

from bisect import bisect_left
from collections.abc import Sequence

from mmsdk.kv.dense import DenseCache
from mmsdk.kv.memory import DenseMemory, Shape
from mmsdk.kv.prefix import onward
from mmsdk.kv.three_level import ThreeLevelCache
from mmsdk.kv.types import KVCache

__all__ = ["HeldMemory", "agreeing"]


class HeldMemory:
    """See `mmsdk.kv.memory.Memory`; for prompts that come one by one, in memory that is exact."""

    def __init__(self) -> None:
        self._memory = DenseMemory()
        self._cache: tuple[DenseCache | ThreeLevelCache, ...] = ()
        # of the tokens that the cache is known to hold, in order
        self._keys: list[bytes] = []

    @property
    def page(self) -> int:
        """Every token can be found again."""
        return 1

    @property
    def chunk(self) -> int:
        """See `Memory`."""
        return self._memory.chunk

    def begin(
        self, shape: Shape, capacities: Sequence[int], keys: Sequence[Sequence[bytes]], copies: int = 1, room: int = 0
    ) -> tuple[KVCache, list[int]]:
        """See `Memory`. Raises ValueError for more prompts than one."""
        (mine,) = keys
        known = agreeing(mine, self._keys)
        for cache in self._cache if known else ():
            known = cache.cut(known)
        if not known:
            self._cache = ()
            fresh, _ = self._memory.begin(shape, capacities, [()], copies, room)
            assert isinstance(fresh, DenseCache | ThreeLevelCache), "an exact memory gives one of these"
            self._cache = (fresh,)
        self._keys = list(mine[:known])
        return self._cache[0], [known]

    def learn(self, cache: KVCache, keys: Sequence[Sequence[bytes]]) -> None:
        """See `Memory`."""
        self._keys = list(keys[0])
        if isinstance(cache, ThreeLevelCache):
            cache.mark()

    def said(self, ids: Sequence[int]) -> None:
        """What was said after the last prompt; those of it that the cache holds are known then."""
        for cache in self._cache if self._keys else ():
            held = int(cache.position) - len(self._keys)
            self._keys += onward(self._keys[-1], ids[:held])

    def behind(self, turns: int) -> None:
        """The next prompt comes behind so many turns: its content tells how much of them is known."""

    def dropped(self, turns: int) -> None:
        """What stood behind so many turns has changed: the same."""


def agreeing(keys: Sequence[bytes], others: Sequence[bytes]) -> int:
    """How many tokens both begin with: a key stands for all that lies before it, too."""
    return bisect_left(range(min(len(keys), len(others))), True, key=lambda place: keys[place] != others[place])
