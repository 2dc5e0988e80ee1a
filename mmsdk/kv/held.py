"""The cache of one conversation, kept from turn to turn, in memories that remember nothing by themselves.

    memory = HeldMemory(DenseMemory())
    cache, known = memory.begin(shape, capacities, keys)    # what this prompt and the last one begin with is in it already
    memory.learn(cache, keys)
    memory.said(ids)                                        # and what was answered, once it has been

A prompt that goes on where the last answer ended finds all of it; one in which something was changed finds what stands before that: the
cache is cut back to there, to the token. What lies behind that is written over, so that it does not matter how an answer ended. A memory of
levels goes back to the end of a prompt that it has read, the last one that the new one begins with.
"""

import sys
from bisect import bisect_left
from collections.abc import Sequence

from mmsdk.kv.dense import DenseCache
from mmsdk.kv.memory import DenseMemory, RoundedMemory, Shape
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.prefix import onward
from mmsdk.kv.three_level import ThreeLevelCache
from mmsdk.kv.types import KVCache

__all__ = ["HeldMemory"]


class HeldMemory:
    """See `mmsdk.kv.memory.Memory`; for prompts that come one by one. Blocks that have aged are kept whole or not at all."""

    def __init__(self, memory: DenseMemory | RoundedMemory) -> None:
        self._memory = memory
        self._cache: tuple[DenseCache | PagedCache | ThreeLevelCache, ...] = ()
        # of the tokens that the cache is known to hold, in order
        self._keys: list[bytes] = []
        self._room = 0
        # what blocks were set aside for: so many answers at one time, of so many tokens
        self._answers = 1, 0

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
        roomy = max(capacities) <= self._room and (copies == 1 or (copies <= self._answers[0] and room <= self._answers[1]))
        known = self._agreeing(mine) if roomy else 0
        for cache in self._cache if known else ():
            known = cache.cut(known)
        if not known:
            self._cache = ()
            cache = self._fresh(shape, capacities, copies, room)
            self._cache = (cache,)
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

    def _agreeing(self, keys: Sequence[bytes]) -> int:
        """How many tokens both begin with: a key stands for all that lies before it, too."""
        return bisect_left(range(min(len(keys), len(self._keys))), True, key=lambda place: keys[place] != self._keys[place])

    def _fresh(self, shape: Shape, capacities: Sequence[int], copies: int, room: int) -> DenseCache | PagedCache | ThreeLevelCache:
        grows = isinstance(self._memory, DenseMemory)
        # blocks are set aside ahead: for a conversation twice as long as this, which is then read anew
        wanted = list(capacities) if grows else [2 * capacity for capacity in capacities]
        self._room = sys.maxsize if grows else max(wanted)
        self._answers = (sys.maxsize, sys.maxsize) if grows else (copies, room)
        cache, _ = self._memory.begin(shape, wanted, [()], copies, room)
        assert isinstance(cache, DenseCache | PagedCache | ThreeLevelCache), "a memory of either kind gives one of these"
        return cache
