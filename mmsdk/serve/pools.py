"""Where the caches of an engine's requests come from, and whether there is room for another, by the memory that its pipeline has.

    PagedPool      "dense", "paged": exact blocks of 16 tokens; prompts that begin alike share those that are read once
    RoundedPool    "int8", "fp8", ...: blocks again, in which all but the last tokens of a request are kept in fewer bits
    PolicyPool     "snapkv:0.25", ...: each request has a memory of its own; what its policy lets go of is room for others
    LevelPool      "dense", of a model that remembers in levels: each request has levels of its own, side by side where they speak

Of exact blocks a request may be set aside and read again. What was rounded or evicted would not be the same when it is read again, and
levels have no blocks to give back, so that there whoever is let in has room to the end of its answer. Methods are told in
`mmsdk.serve.pool.Pool`.
"""

import sys
from collections.abc import Sequence

import torch

from mmsdk.errors import InputError
from mmsdk.kv.abreast import abreast, apart
from mmsdk.kv.memory import DenseMemory, Memory, PagedMemory, RoundedMemory
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.pages import PAGE, Pages, RowPages
from mmsdk.kv.policy_cache import PolicyCache
from mmsdk.kv.policy_memory import PolicyMemory
from mmsdk.kv.prefix import Prefixes
from mmsdk.kv.rounded import PAGE as ROUNDED_PAGE
from mmsdk.kv.rounded import RoundedPages
from mmsdk.kv.shape import Shape
from mmsdk.kv.three_level import Plan, ThreeLevelCache
from mmsdk.kv.types import KVCache
from mmsdk.serve.pool import Pool

__all__ = ["LevelPool", "PagedPool", "PolicyPool", "RoundedPool", "pool_of"]


def pool_of(memory: Memory, shape: Shape, rows: int, tokens: int, chunk: int) -> Pool:
    """The pool for the requests of a pipeline with this memory, `rows` at one time and `tokens` of them all, about `chunk` read in a step.

    Raises InputError, naming the memory, where it does not fit the model.
    """
    for plan in shape.levels:
        return LevelPool(plan, shape, tokens)
    if isinstance(memory, PolicyMemory):
        return PolicyPool(memory, shape, tokens)
    if isinstance(memory, RoundedMemory):
        return RoundedPool(memory, shape, rows, tokens, chunk)
    if isinstance(memory, DenseMemory | PagedMemory):
        return PagedPool(shape, tokens)
    raise InputError(f"an engine has no pool for {type(memory).__name__}; choose paged, bits such as int8, or a policy", item="kv")


class InPages:
    """What pools of blocks have in common, exact or rounded."""

    blocks: Pages | RoundedPages

    def empty(self) -> KVCache:
        """See `Pool`."""
        return PagedCache.empty(self.blocks, 1)

    def joined(self, caches: Sequence[KVCache]) -> KVCache:
        """See `Pool`."""
        return _joined(caches)

    def picked(self, cache: KVCache, rows: Sequence[int]) -> KVCache:
        """See `Pool`."""
        left = _paged(cache).select(torch.tensor(rows)) if rows else self.empty()
        self.release(cache)
        return left

    def release(self, cache: KVCache) -> None:
        """See `Pool`."""
        _paged(cache).release()


class PagedPool(InPages):
    """One pool of exact blocks, and the prompts that are still in it."""

    blocks: Pages
    rereads = True
    page = PAGE
    most = sys.maxsize

    def __init__(self, shape: Shape, tokens: int) -> None:
        self.blocks = Pages(shape.layers, shape.kv_heads, shape.head_dim, _blocks(tokens, PAGE), shape.dtype, shape.device)
        self._layers = range(shape.layers)
        self._prefixes = Prefixes(self.blocks.blocks, shape.layers)

    @property
    def tokens(self) -> int:
        """See `Pool`."""
        return self.blocks.blocks.columns * PAGE

    def pieces(self, length: int) -> tuple[range, ...]:
        """Any number of tokens goes through."""
        return ()

    def known(self, keys: Sequence[bytes]) -> int:
        """See `Pool`."""
        return self._prefixes.known(keys)

    def begin(
        self, keys: Sequence[bytes], tokens: int, upto: int, ahead: Sequence[int], caches: Sequence[KVCache]
    ) -> tuple[tuple[KVCache, int], ...]:
        """See `Pool`."""
        known = self._prefixes.match(keys)
        done, cache = len(known) * PAGE, PagedCache.of(self.blocks, [RowPages(known, len(known) * PAGE)])
        wanted = _blocks(upto, PAGE) - len(known) + sum(_blocks(more, PAGE) for more in ahead)
        self._prefixes.evict(wanted)
        if ahead and self.blocks.blocks.free(self._layers) < wanted:
            cache.release()
            return ()
        cache.reserve(tokens - done)
        return ((cache, done),)

    def learn(self, cache: KVCache, keys: Sequence[bytes]) -> None:
        """See `Pool`."""
        self._prefixes.learn(keys, _paged(cache).columns(0))

    def goes_on(self, cache: KVCache) -> bool:
        """See `Pool`."""
        if _paged(cache).fits(1):
            return True
        self._prefixes.evict(len(cache.position))
        return _paged(cache).fits(1)

    def clear(self) -> None:
        """See `Pool`."""
        self._prefixes.clear()

    def held(self, caches: Sequence[KVCache]) -> int:
        """See `Pool`."""
        return self.blocks.blocks.held - self.blocks.blocks.idle


class RoundedPool(InPages):
    """One pool of exact blocks for what is recent, and one of rounded ones; nothing is remembered of past prompts."""

    blocks: RoundedPages
    rereads = False
    page = 0

    def __init__(self, memory: RoundedMemory, shape: Shape, rows: int, tokens: int, chunk: int) -> None:
        """Raises InputError where the model keeps latents."""
        self.most = memory.chunk
        # Everyone has a window and the blocks at its two ends; what is read in one step, which may be more than a chunk, ages in the next.
        recent = rows * (_blocks(memory.window, ROUNDED_PAGE) + 4) + _blocks(max(2 * chunk, memory.chunk), ROUNDED_PAGE) + 1
        pages = Pages(shape.layers, shape.kv_heads, shape.head_dim, recent, shape.dtype, shape.device, ROUNDED_PAGE)
        self.blocks = RoundedPages(pages, memory.bits, _blocks(tokens, ROUNDED_PAGE), memory.window)
        self._layers = range(shape.layers)

    @property
    def tokens(self) -> int:
        """See `Pool`."""
        return self.blocks.old.columns * ROUNDED_PAGE

    def pieces(self, length: int) -> tuple[range, ...]:
        """As the pipeline reads them: what a token sees exactly and what rounded depends on where it is cut."""
        return tuple(range(start, min(length, start + self.most)) for start in range(0, length, self.most))

    def known(self, keys: Sequence[bytes]) -> int:
        """None."""
        return 0

    def begin(
        self, keys: Sequence[bytes], tokens: int, upto: int, ahead: Sequence[int], caches: Sequence[KVCache]
    ) -> tuple[tuple[KVCache, int], ...]:
        """See `Pool`."""
        # all that is recent now may be old before the answers end
        recent = sum(len(_paged(cache).columns(row)) for cache in caches for row in range(len(cache.position)))
        wanted = _blocks(upto, ROUNDED_PAGE) + recent + sum(_blocks(more, ROUNDED_PAGE) for more in ahead)
        return () if ahead and self.blocks.old.free(self._layers) < wanted else ((self.empty(), 0),)

    def learn(self, cache: KVCache, keys: Sequence[bytes]) -> None:
        """Nothing."""

    def goes_on(self, cache: KVCache) -> bool:
        """Whoever was let in has room."""
        return True

    def clear(self) -> None:
        """Nothing."""

    def held(self, caches: Sequence[KVCache]) -> int:
        """See `Pool`."""
        return self.blocks.blocks.held + self.blocks.old.held


class PolicyPool:
    """A memory for each request, side by side where they speak; their prompts are read whole, as policies want them."""

    rereads = False
    page = 0
    most = sys.maxsize

    def __init__(self, memory: PolicyMemory, shape: Shape, tokens: int) -> None:
        """Raises InputError where the model keeps latents."""
        memory.begin(shape, [tokens], [()])
        self._memory, self._shape, self._tokens = memory, shape, tokens

    @property
    def tokens(self) -> int:
        """See `Pool`."""
        return self._tokens

    def pieces(self, length: int) -> tuple[range, ...]:
        """All of it."""
        return (range(length),)

    def known(self, keys: Sequence[bytes]) -> int:
        """None."""
        return 0

    def begin(
        self, keys: Sequence[bytes], tokens: int, upto: int, ahead: Sequence[int], caches: Sequence[KVCache]
    ) -> tuple[tuple[KVCache, int], ...]:
        """See `Pool`. What a policy has let go of counts no more."""
        slots = sum(_own(cache).span for cache in caches)
        there = _blocks(slots, self._shape.layers * self._shape.kv_heads)
        return () if ahead and there + sum(ahead) + upto > self._tokens else ((self.empty(), 0),)

    def learn(self, cache: KVCache, keys: Sequence[bytes]) -> None:
        """What is above the budget goes."""
        self._memory.learn(cache, [keys])

    def goes_on(self, cache: KVCache) -> bool:
        """Whoever was let in has room."""
        return True

    def empty(self) -> KVCache:
        """See `Pool`."""
        return self._memory.cache(self._shape.layers, 1, self._shape.device)

    def joined(self, caches: Sequence[KVCache]) -> KVCache:
        """See `Pool`."""
        return abreast([row for cache in caches for row in apart(_own(cache))])

    def picked(self, cache: KVCache, rows: Sequence[int]) -> KVCache:
        """See `Pool`."""
        there, first = apart(_own(cache)), torch.zeros(1, dtype=torch.int64, device=self._shape.device)
        # who is there more than once is a copy, but for the last time
        again = [row in rows[place + 1 :] for place, row in enumerate(rows)]
        picked = [there[row].select(first) if more else there[row] for row, more in zip(rows, again, strict=True)]
        return abreast(picked) if rows else self.empty()

    def release(self, cache: KVCache) -> None:
        """Its memory is free when nobody holds it any more."""

    def clear(self) -> None:
        """Nothing."""

    def held(self, caches: Sequence[KVCache]) -> int:
        """In blocks of 16 tokens of a layer."""
        return sum(_blocks(_own(cache).span, self._shape.kv_heads * PAGE) for cache in caches)


class LevelPool:
    """A memory of levels for each request, side by side where they speak; nothing is remembered of past prompts."""

    rereads = False
    page = 0
    most = sys.maxsize

    def __init__(self, plan: Plan, shape: Shape, tokens: int) -> None:
        self._plan, self._shape, self._tokens = plan, shape, tokens

    @property
    def tokens(self) -> int:
        """See `Pool`."""
        return self._tokens

    def pieces(self, length: int) -> tuple[range, ...]:
        """Any number of tokens goes through."""
        return ()

    def known(self, keys: Sequence[bytes]) -> int:
        """None."""
        return 0

    def begin(
        self, keys: Sequence[bytes], tokens: int, upto: int, ahead: Sequence[int], caches: Sequence[KVCache]
    ) -> tuple[tuple[KVCache, int], ...]:
        """See `Pool`. Room is counted in tokens read, of which most are only there as entries."""
        there = sum(int(cache.position.sum()) for cache in caches)
        return () if ahead and there + sum(ahead) + upto > self._tokens else ((self._fresh(upto), 0),)

    def learn(self, cache: KVCache, keys: Sequence[bytes]) -> None:
        """Nothing."""

    def goes_on(self, cache: KVCache) -> bool:
        """Whoever was let in has room."""
        return True

    def empty(self) -> KVCache:
        """See `Pool`."""
        return self._fresh(1)

    def joined(self, caches: Sequence[KVCache]) -> KVCache:
        """See `Pool`."""
        return caches[0] if len(caches) == 1 else ThreeLevelCache.joined([_levels(cache) for cache in caches])

    def picked(self, cache: KVCache, rows: Sequence[int]) -> KVCache:
        """See `Pool`."""
        return cache.select(torch.tensor(rows, device=self._shape.device)) if rows else self.empty()

    def release(self, cache: KVCache) -> None:
        """Its memory is free when nobody holds it any more."""

    def clear(self) -> None:
        """Nothing."""

    def held(self, caches: Sequence[KVCache]) -> int:
        """In blocks of 16 entries of a layer."""
        return sum(_blocks(_levels(cache).span, PAGE) for cache in caches)

    def _fresh(self, capacity: int) -> ThreeLevelCache:
        return ThreeLevelCache.allocate(self._plan, 1, capacity, self._shape.dtype, self._shape.device)


def _blocks(tokens: int, page: int) -> int:
    """Those for so many tokens."""
    return -(-tokens // page)


def _paged(cache: KVCache) -> PagedCache:
    assert isinstance(cache, PagedCache), "a pool is given its own caches"
    return cache


def _own(cache: KVCache) -> PolicyCache:
    assert isinstance(cache, PolicyCache), "a pool is given its own caches"
    return cache


def _levels(cache: KVCache) -> ThreeLevelCache:
    assert isinstance(cache, ThreeLevelCache), "a pool is given its own caches"
    return cache


def _joined(caches: Sequence[KVCache]) -> KVCache:
    if len(caches) == 1:
        return caches[0]
    together = PagedCache.joined([_paged(cache) for cache in caches])
    for cache in caches:
        _paged(cache).release()
    return together
