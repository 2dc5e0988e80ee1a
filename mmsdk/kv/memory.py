"""Where the caches of a pipeline come from, and what it remembers between calls.

    memory = memory_of("paged")
    cache, known = memory.begin(shape, capacities, keys)     # the first known[i] tokens of row i are in the cache already
    ...                                                      # the others go through the decoder
    memory.learn(cache, keys)

Rows are told by the keys of their blocks (`mmsdk.kv.prefix.chain`); a memory without blocks asks for none and remembers nothing.
"""

import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from mmsdk import plugins
from mmsdk.errors import PluginError
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.pages import PAGE, Pages, RowPages
from mmsdk.kv.policy_memory import POLICIES, policy_of
from mmsdk.kv.prefix import Prefixes
from mmsdk.kv.rounded import PAGE as ROUNDED_PAGE
from mmsdk.kv.rounded import WINDOW, RoundedPages
from mmsdk.kv.rounding import Bits, names
from mmsdk.kv.shape import Shape
from mmsdk.kv.three_level import ThreeLevelCache
from mmsdk.kv.types import KVCache
from mmsdk.vision.values import shown

__all__ = ["KINDS", "DenseMemory", "Memory", "PagedMemory", "RoundedMemory", "Shape", "memory_of"]

# Columns of a pool for each that a call needs.
_SPARE = 4

KINDS: tuple[str, ...] = ("dense", "paged", *names())


@runtime_checkable
class Memory(Protocol):
    """Caches for batches of prompts."""

    @property
    def page(self) -> int:
        """Tokens of a block that can be found again; 0 where nothing is remembered, and no keys are wanted."""
        ...

    @property
    def chunk(self) -> int:
        """How many tokens of a prompt go through the decoder at one time, at most."""
        ...

    def begin(
        self, shape: Shape, capacities: Sequence[int], keys: Sequence[Sequence[bytes]], copies: int = 1, room: int = 0
    ) -> tuple[KVCache, list[int]]:
        """A cache with room for so many tokens of each row in each layer, and how many tokens of each row it knows already.

        There is a list of keys for every row. At least the last token of a prompt is never known: someone waits for its output. Each row
        may be selected for so many answers of at most `room` tokens; the capacities have room for one of them.
        """
        ...

    def learn(self, cache: KVCache, keys: Sequence[Sequence[bytes]]) -> None:
        """Remember prompts that a cache of this memory now holds."""
        ...


@dataclass(frozen=True, slots=True)
class DenseMemory:
    """One block of memory per call and layer, or the levels of a model that remembers in those; nothing is remembered between calls."""

    @property
    def page(self) -> int:
        """Nothing can be found again."""
        return 0

    @property
    def chunk(self) -> int:
        """Prompts go through whole."""
        return sys.maxsize

    def begin(
        self, shape: Shape, capacities: Sequence[int], keys: Sequence[Sequence[bytes]], copies: int = 1, room: int = 0
    ) -> tuple[KVCache, list[int]]:
        """See `Memory`."""
        for plan in shape.levels:
            return ThreeLevelCache.allocate(plan, len(keys), max(capacities), shape.dtype, shape.device), [0] * len(keys)
        sizes = shape.layers, len(keys), shape.kv_heads, shape.head_dim, capacities
        return DenseCache.allocate(*sizes, shape.dtype, shape.device), [0] * len(keys)

    def learn(self, cache: KVCache, keys: Sequence[Sequence[bytes]]) -> None:
        """Nothing."""


class _Promise:
    """Room that a call may still take."""

    __slots__ = ("__weakref__",)


class PagedMemory:
    """One pool of blocks for all calls, and the prompts that are still in it.

    The pool is four times as large as calls have needed so far, for what is remembered. A call that needs more gets a larger one,
    and what was remembered is then forgotten; caches of the old one live on in it.
    """

    def __init__(self) -> None:
        self._pools: dict[Shape, tuple[Pages, Prefixes]] = {}
        self._promised: dict[Shape, int] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        """The kind: what is in it is no part of that."""
        return "PagedMemory()"

    def __deepcopy__(self, memo: dict[int, object]) -> "PagedMemory":
        """Another pool, in which nothing is remembered yet."""
        return PagedMemory()

    @property
    def page(self) -> int:
        """Tokens of a block."""
        return PAGE

    @property
    def chunk(self) -> int:
        """Prompts go through whole."""
        return sys.maxsize

    @property
    def held(self) -> int:
        """Blocks that caches hold, over all layers; what is only remembered does not count."""
        return sum(pages.blocks.held - prefixes.idle for pages, prefixes in self._pools.values())

    def begin(
        self, shape: Shape, capacities: Sequence[int], keys: Sequence[Sequence[bytes]], copies: int = 1, room: int = 0
    ) -> tuple[KVCache, list[int]]:
        """See `Memory`."""
        with self._lock:
            needed = len(keys) * (-(-max(capacities) // PAGE) + 1 + _more(copies, room, PAGE))
            pages, prefixes = self._roomy(shape, needed)
            rows = [RowPages(columns, len(columns) * PAGE) for columns in map(prefixes.match, keys)]
            cache = PagedCache.of(pages, rows)
            # What the call may still take is not given to another one, whichever cache of it goes on.
            self._promised[shape] += needed
            cache.promise = _Promise()
            weakref.finalize(cache.promise, self._fulfilled, shape, pages, needed).atexit = False
        return cache, [row.length for row in rows]

    def learn(self, cache: KVCache, keys: Sequence[Sequence[bytes]]) -> None:
        """See `Memory`. A cache of an older, smaller pool is not remembered."""
        assert isinstance(cache, PagedCache), "a memory is taught by its own caches"
        with self._lock:
            for pages, prefixes in self._pools.values():
                if cache.of_pool(pages):
                    for row, chain in enumerate(keys):
                        prefixes.learn(chain, cache.columns(row))

    def forget(self) -> None:
        """Let go of everything that is remembered."""
        with self._lock:
            for _, prefixes in self._pools.values():
                prefixes.clear()

    def _roomy(self, shape: Shape, needed: int) -> tuple[Pages, Prefixes]:
        """The pool, with so many columns that nobody holds or was promised."""
        wanted = needed + self._promised.setdefault(shape, 0)
        if shape in self._pools:
            pages, prefixes = self._pools[shape]
            prefixes.evict(wanted)
            if pages.blocks.free(range(shape.layers)) >= wanted:
                return pages, prefixes
            prefixes.clear()
        self._promised[shape] = 0
        pages = Pages(shape.layers, shape.kv_heads, shape.head_dim, _SPARE * wanted, shape.dtype, shape.device)
        self._pools[shape] = pages, Prefixes(pages.blocks, shape.layers)
        return self._pools[shape]

    def _fulfilled(self, shape: Shape, pages: Pages, needed: int) -> None:
        with self._lock:
            if self._pools[shape][0] is pages:
                self._promised[shape] -= needed


@dataclass(frozen=True, slots=True)
class RoundedMemory:
    """The last tokens of each row exactly and older ones in fewer bits; nothing is remembered."""

    bits: Bits
    window: int = WINDOW

    @property
    def page(self) -> int:
        """Nothing can be found again."""
        return 0

    @property
    def chunk(self) -> int:
        """Few enough tokens that those still exact never need much memory."""
        return 512

    def begin(
        self, shape: Shape, capacities: Sequence[int], keys: Sequence[Sequence[bytes]], copies: int = 1, room: int = 0
    ) -> tuple[KVCache, list[int]]:
        """See `Memory`."""
        return PagedCache.empty(self.store(shape, *self.blocks(len(keys), max(capacities), copies, room)), len(keys)), [0] * len(keys)

    def blocks(self, rows: int, most: int, copies: int = 1, room: int = 0) -> tuple[int, int]:
        """How many exact blocks and how many rounded ones rows of up to `most` tokens take, with so many answers to each."""
        # A chunk comes on top of the window before anything of it ages; the two ends of a row may lie amid a block.
        recent = rows * (-(-min(self.window + self.chunk, most) // ROUNDED_PAGE) + 2)
        # Each answer has a window of its own, which ages for itself.
        own = _more(copies, self.window + room, ROUNDED_PAGE)
        return recent + rows * own, rows * (-(-most // ROUNDED_PAGE) + 1 + own)

    def store(self, shape: Shape, recent: int, old: int) -> RoundedPages:
        """So many exact and rounded blocks."""
        pages = Pages(shape.layers, shape.kv_heads, shape.head_dim, recent, shape.dtype, shape.device, ROUNDED_PAGE)
        return RoundedPages(pages, self.bits, old, self.window)

    def learn(self, cache: KVCache, keys: Sequence[Sequence[bytes]]) -> None:
        """Nothing."""


def _more(copies: int, tokens: int, page: int) -> int:
    """The blocks of so many tokens that all copies but the first take; the last of the prompt's is one, since each writes into it."""
    return (copies - 1) * (-(-tokens // page) + 2)


def memory_of(kind: str | None) -> Memory:
    """A memory by its name: "dense", "paged", the bits of older tokens, or a policy with its budget ("snapkv:0.25"); None is "dense".

    Raises PluginError for another and for a knob that is wrong, BudgetError for a budget that cannot be.
    """
    kind = "dense" if kind is None else kind
    if not isinstance(kind, str):
        raise PluginError(f'kv: {shown(kind)} names no memory; write a name, such as "paged", or "snapkv:0.25" (`mmsdk methods`)')
    name = plugins.parse(kind).name if kind.strip() else kind
    if kind not in KINDS and name in plugins.available(POLICIES):
        return policy_of(kind)
    if kind not in KINDS:
        raise PluginError(f"kv: {kind!r} is not known; {_choices(name)}")
    for bits in names():
        if bits == kind:
            return RoundedMemory(bits)
    return DenseMemory() if kind == "dense" else PagedMemory()


def _choices(name: str) -> str:
    """What was meant by a name that is not known, and all that there is."""
    policies = plugins.available(POLICIES)
    near = plugins.near(name, [*KINDS, *policies])
    return f"{near}choose {', '.join(KINDS)}, or one of {', '.join(policies)}"
