"""A memory for one answer that notes which cache it handed out, so that its bytes can be told when the answer is there."""

from collections.abc import Sequence

from mmsdk.kv.dense import DenseCache
from mmsdk.kv.memory import Memory, Shape
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.policy_cache import PolicyCache
from mmsdk.kv.three_level import ThreeLevelCache
from mmsdk.kv.types import KVCache

__all__ = ["Noted"]


class Noted:
    """See `mmsdk.kv.memory.Memory`; everything is done by the memory inside."""

    def __init__(self, inner: Memory) -> None:
        self._inner = inner
        self._cache: tuple[KVCache, ...] = ()

    @property
    def page(self) -> int:
        """See `Memory`."""
        return self._inner.page

    @property
    def chunk(self) -> int:
        """See `Memory`."""
        return self._inner.chunk

    @property
    def megabytes(self) -> float:
        """MB of keys and values that the last cache holds, room for the rest of the answer included where it was set aside."""
        counted = DenseCache | PagedCache | PolicyCache | ThreeLevelCache
        return sum(cache.nbytes for cache in self._cache if isinstance(cache, counted)) / 1e6

    def begin(
        self, shape: Shape, capacities: Sequence[int], keys: Sequence[Sequence[bytes]], copies: int = 1, room: int = 0
    ) -> tuple[KVCache, list[int]]:
        """See `Memory`."""
        cache, known = self._inner.begin(shape, capacities, keys, copies, room)
        self._cache = (cache,)
        return cache, known

    def learn(self, cache: KVCache, keys: Sequence[Sequence[bytes]]) -> None:
        """See `Memory`."""
        self._inner.learn(cache, keys)
