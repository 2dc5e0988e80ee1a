"""The cache of one conversation in fewer bits, kept from turn to turn; the interface of `mmsdk.kv.held`.

    memory = HeldRounded(RoundedMemory("int4"))
    memory.behind(2)                                        # the next prompt comes behind two turns
    cache, known = memory.begin(shape, capacities, keys)
    memory.learn(cache, keys)
    memory.said(ids)                                        # the third turn counts

What has been rounded cannot be made exact again, so that a cache which is cut back is not what it was before it grew. Every turn goes on
in a fork, therefore: one that is broken off is thrown away, and one that counts is kept beside the last few before it, which go on where
turns are taken back or asked in other words. Forks share all blocks but those that only one of them holds. What lies further back is read
anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmsdk.kv.held import agreeing
from mmsdk.kv.memory import RoundedMemory
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.prefix import onward
from mmsdk.kv.rounded import RoundedPages
from mmsdk.kv.shape import Shape
from mmsdk.kv.types import KVCache

__all__ = ["STATES", "HeldRounded"]

# Turns that can be gone back to: each keeps a window of exact tokens, as far as it does not share them.
STATES = 4


@dataclass(frozen=True, slots=True)
class Pool:
    """Blocks for rows of up to `tokens` tokens, with so many answers of so many tokens at one time."""

    store: RoundedPages
    shape: Shape
    tokens: int
    answers: tuple[int, int]

    @staticmethod
    def of(memory: RoundedMemory, shape: Shape, tokens: int, answers: tuple[int, int]) -> "Pool":
        """Blocks for one such row, and for what is kept of earlier turns beside it."""
        recent, old = memory.blocks(1, tokens, *answers)
        kept, _ = memory.blocks(1, min(tokens, memory.window))
        return Pool(memory.store(shape, recent + STATES * kept, old), shape, tokens, answers)

    def holds(self, memory: RoundedMemory, most: int, copies: int, room: int, aged: int) -> bool:
        """Whether a row of up to `most` tokens, `aged` blocks of which are here already, has room beside what is kept."""
        if most > self.tokens or (copies > 1 and (copies > self.answers[0] or room > self.answers[1])):
            return False
        (recent, old), layers = memory.blocks(1, most, copies, room), range(self.store.layers)
        return recent <= self.store.blocks.free(layers) and old - aged <= self.store.old.free(layers)


@dataclass(frozen=True, slots=True)
class State:
    """The conversation after so many turns: the keys of its tokens, and a cache that nobody writes into."""

    turns: int
    keys: tuple[bytes, ...]
    cache: PagedCache
    pool: Pool


class HeldRounded:
    """See `mmsdk.kv.memory.Memory`; for prompts that come one by one. Blocks that have aged are kept whole or not at all."""

    def __init__(self, memory: RoundedMemory) -> None:
        self._memory = memory
        # in the order of their turns
        self._states: tuple[State, ...] = ()
        self._turns = 0
        # what is being read and answered now
        self._now: tuple[tuple[PagedCache, Pool], ...] = ()
        self._keys: list[bytes] = []

    def __deepcopy__(self, memo: dict[int, object]) -> "HeldRounded":
        """The conversation as it stands, in blocks of its own."""
        other = HeldRounded(self._memory)
        other._turns = self._turns
        for state in self._states[-1:]:
            pool = Pool.of(self._memory, state.pool.shape, state.pool.tokens, state.pool.answers)
            other._states = (replace(state, cache=state.cache.moved(pool.store), pool=pool),)
        return other

    @property
    def page(self) -> int:
        """Every token can be found again."""
        return 1

    @property
    def chunk(self) -> int:
        """See `Memory`."""
        return self._memory.chunk

    def behind(self, turns: int) -> None:
        """The next prompt comes behind the first so many turns; the others are there until it has been answered."""
        self._turns = turns

    def dropped(self, turns: int) -> None:
        """Only the first so many turns are as they were."""
        self._states = tuple(state for state in self._states if state.turns <= turns)

    def begin(
        self, shape: Shape, capacities: Sequence[int], keys: Sequence[Sequence[bytes]], copies: int = 1, room: int = 0
    ) -> tuple[KVCache, list[int]]:
        """See `Memory`. Raises ValueError for more prompts than one."""
        (mine,), most = keys, max(capacities)
        # blocks are set aside ahead: for a conversation twice as long as this, which then moves on
        ahead = 2 * most
        # whoever was broken off may still be held by the traceback of it
        for cache, _ in self._now:
            cache.release()
        self._now, self._keys = (), []
        for state in [state for state in self._states if state.turns <= self._turns][-1:]:
            cache = state.cache.fork()
            known = cache.cut(agreeing(mine, state.keys))
            if known:
                pool = state.pool
                if not pool.holds(self._memory, most, copies, room, cache.aged):
                    pool = Pool.of(self._memory, shape, ahead, (copies, room))
                    cache = cache.moved(pool.store)
                return self._begun(cache, pool, known)
        pool = Pool.of(self._memory, shape, ahead, (copies, room))
        return self._begun(PagedCache.empty(pool.store, 1), pool, 0)

    def learn(self, cache: KVCache, keys: Sequence[Sequence[bytes]]) -> None:
        """See `Memory`."""
        self._keys = list(keys[0])

    def said(self, ids: Sequence[int]) -> None:
        """What was said after the last prompt: the turn counts, and those behind which it does not stand are gone."""
        self.dropped(self._turns)
        self._turns += 1
        for cache, pool in self._now if self._keys else ():
            held = int(cache.position) - len(self._keys)
            self._keys += onward(self._keys[-1], ids[:held])
            # what is kept takes no more than a window
            cache.age()
            self._states = (*self._states, State(self._turns, tuple(self._keys), cache, pool))[-STATES:]
        self._now = ()

    def _begun(self, cache: PagedCache, pool: Pool, known: int) -> tuple[KVCache, list[int]]:
        self._now = ((cache, pool),)
        return cache, [known]
