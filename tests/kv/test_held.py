"""Caches that are cut back, and the memory that does so between the turns of a conversation."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from mmsdk.kv.dense import DenseCache
from mmsdk.kv.held import HeldMemory
from mmsdk.kv.held_rounded import STATES, HeldRounded
from mmsdk.kv.memory import RoundedMemory, Shape
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.pages import Pages
from mmsdk.kv.prefix import Words, chain, digest
from mmsdk.kv.rounding import Bits, names

LAYERS, HEADS, WIDTH = 2, 2, 4
SHAPE = Shape(LAYERS, HEADS, WIDTH, torch.float32, torch.device("cpu"))
Kept = DenseCache | PagedCache


def dense() -> Kept:
    return DenseCache.allocate(LAYERS, 1, HEADS, WIDTH, 4, torch.float32, "cpu")


def paged() -> Kept:
    return PagedCache.empty(Pages(LAYERS, HEADS, WIDTH, 60, torch.float32, "cpu", page=4), 1)


def store(cache: Kept, start: int, count: int, seed: int) -> list[Tensor]:
    """So many tokens from `start` on, random in every layer; their keys."""
    new = torch.randn(LAYERS, 2, 1, HEADS, count, WIDTH, generator=torch.Generator().manual_seed(seed))
    cache.advance(torch.arange(start, start + count)[None])
    for layer in range(LAYERS):
        cache.append(layer, *new[layer])
    return [new[layer, 0] for layer in range(LAYERS)]


@pytest.mark.parametrize("make", [dense, paged])
@pytest.mark.parametrize("left", [1, 4, 6, 11])
def test_a_cache_that_is_cut_goes_on_from_there_and_a_fork_keeps_what_it_had(make: Callable[[], Kept], left: int) -> None:
    cache = make()
    first = store(cache, 0, 11, 0)
    fork = cache.fork()
    assert cache.cut(left) == left and cache.position.tolist() == [left]
    second = store(cache, left, 5, 1)
    for layer in range(LAYERS):
        view = cache.view(layer)
        assert torch.equal(view.keys, torch.cat([first[layer][:, :, :left], second[layer]], dim=2)) and view.ordered
        assert view.positions.tolist() == [list(range(left + 5))] and view.lengths.tolist() == [left + 5]
        assert torch.equal(fork.view(layer).keys, first[layer])


def test_what_is_cut_off_gives_its_blocks_back() -> None:
    pages = Pages(LAYERS, HEADS, WIDTH, 10, torch.float32, "cpu", page=4)
    cache = PagedCache.empty(pages, 1)
    store(cache, 0, 18, 0)
    assert pages.blocks.held == LAYERS * 5
    cache.cut(8)
    assert pages.blocks.held == LAYERS * 2
    store(cache, 8, 1, 1)
    cache.release()
    assert pages.blocks.held == 0


@pytest.mark.parametrize(("wanted", "left"), [(190, 190), (160, 160), (70, 64), (20, 0)])
def test_blocks_in_fewer_bits_are_kept_whole_or_not_at_all(wanted: int, left: int) -> None:
    cache, _ = RoundedMemory("int8", window=32).begin(SHAPE, [200], [[]])
    assert isinstance(cache, PagedCache)
    store(cache, 0, 199, 0)
    store(cache, 199, 1, 0)
    before = cache.view(1).keys.clone()
    assert cache.cut(wanted) == left and cache.position.tolist() == [left]
    new = store(cache, left, 3, 1)
    assert torch.equal(cache.view(1).keys, torch.cat([before[:, :, :left], new[1]], dim=2))


def keys(ids: Sequence[int]) -> list[bytes]:
    return chain(b"root", [Words(tuple(ids))], 1)


def told(memory: HeldMemory | HeldRounded, ids: Sequence[int], said: Sequence[int] = (), room: int = 8) -> int:
    """Read a prompt and say an answer, whose last token no cache holds; how many tokens were known. As the stages do it."""
    cache, (known,) = memory.begin(SHAPE, [len(ids) + room] * LAYERS, [keys(ids)[: len(ids) - 1]])
    assert isinstance(cache, Kept) and cache.position.tolist() == [known]
    store(cache, known, len(ids) - known, 0)
    memory.learn(cache, [keys(ids)])
    if len(said) > 1:
        store(cache, len(ids), len(said) - 1, 1)
    memory.said(said)
    return known


@pytest.mark.parametrize("make", [HeldMemory, lambda: HeldRounded(RoundedMemory("int8"))])
def test_what_two_prompts_begin_with_is_known_answers_too(make: Callable[[], HeldMemory | HeldRounded]) -> None:
    memory = make()
    assert told(memory, [1, 2, 3], [7, 8, 9]) == 0
    assert told(memory, [1, 2, 3, 7, 8, 9, 4], [5, 5]) == 5
    assert told(memory, [1, 2, 3, 7, 8, 9, 4], [5, 6]) == 6  # the same again: someone waits for its last token
    assert told(memory, [1, 2, 3, 7, 0, 0]) == 4
    assert told(memory, [1, 2, 3, 7, 8]) == 4
    assert told(memory, [2, 2, 3]) == 0


def test_what_nobody_registered_is_not_known() -> None:
    """An answer that was left: its tokens are in the cache, and are written over."""
    memory = HeldMemory()
    cache, _ = memory.begin(SHAPE, [10] * LAYERS, [keys([1, 2])])
    assert isinstance(cache, DenseCache)
    store(cache, 0, 3, 0)
    memory.learn(cache, [keys([1, 2, 3])])
    store(cache, 3, 4, 1)
    assert told(memory, [1, 2, 3, 4, 5, 6, 7, 8]) == 3
    # one that broke off while its prompt was read
    memory.begin(SHAPE, [10] * LAYERS, [keys([1, 2, 9, 9])])
    assert told(memory, [1, 2, 9, 9, 9]) == 2


def test_prompts_that_no_key_tells_are_read_anew() -> None:
    memory = HeldMemory()
    for _ in range(2):
        cache, known = memory.begin(SHAPE, [10] * LAYERS, [[]])
        assert known == [0] and isinstance(cache, DenseCache) and cache.position.tolist() == [0]
        store(cache, 0, 3, 0)
        memory.learn(cache, [[]])
        memory.said([5, 6])


def test_a_conversation_in_fewer_bits_outgrows_its_blocks_and_takes_what_was_read_along() -> None:
    memory, ids = HeldRounded(RoundedMemory("int8")), list[int]()
    pools = set[int]()
    for turn in range(12):
        ids += range(100 * turn, 100 * turn + 40)
        before = held(memory)
        assert told(memory, ids) == 40 * turn
        for now, then in zip(held(memory), before, strict=False):
            # the window's end is rounded meanwhile; what was rounded before is what it was
            old = max(0, 40 * turn - 160)
            assert torch.equal(now[:, :, :old], then[:, :, :old])
        pools.add(id(memory._states[-1].pool))
    assert 2 <= len(pools) <= 5


def held(memory: HeldRounded) -> list[Tensor]:
    """Keys and values of the conversation as it stands, layer by layer."""
    cache = memory._states[-1].cache if memory._states else None
    views = [cache.view(layer) for layer in range(LAYERS)] if cache else []
    return [part for view in views for part in (view.keys.clone(), view.values.clone())]


@pytest.mark.parametrize("bits", names())
@pytest.mark.parametrize("length", [10, 300, 2000])
def test_a_turn_that_is_broken_off_leaves_blocks_in_fewer_bits_as_they_were(bits: Bits, length: int) -> None:
    """While its prompt is read, or its answer said; also one so long that it took a pool of its own."""
    memory = HeldRounded(RoundedMemory(bits, window=32))
    first = list(range(200))
    told(memory, first, [900, 901])
    wanted = held(memory)
    for said in (0, 40):
        ids = [*first, 900, *range(1000, 1000 + length)]
        cache, (known,) = memory.begin(SHAPE, [len(ids) + 50] * LAYERS, [keys(ids)[:-1]])
        assert isinstance(cache, PagedCache) and known == 201
        for start in range(known, len(ids), memory.chunk):
            store(cache, start, min(memory.chunk, len(ids) - start), start)
        if said:
            memory.learn(cache, [keys(ids)])
            store(cache, len(ids), said, 3)
        assert all(map(torch.equal, held(memory), wanted))
    # the last one is still held by somebody, as by a traceback
    again, (known,) = memory.begin(SHAPE, [300] * LAYERS, [keys([*first, 900, 5, 5, 5])[:-1]])
    assert known == 201 and isinstance(again, PagedCache)
    for layer in range(LAYERS):
        view = again.view(layer)
        assert torch.equal(view.keys, wanted[2 * layer]) and torch.equal(view.values, wanted[2 * layer + 1])


def test_turns_are_gone_back_to_and_what_is_kept_of_them_has_a_bound() -> None:
    memory, ids, after = HeldRounded(RoundedMemory("int4", window=32)), list[int](), dict[int, list[Tensor]]()
    for turn in range(8):
        memory.behind(turn)
        ids += range(100 * turn, 100 * turn + 70)
        told(memory, ids)
        after[turn + 1] = held(memory)
    assert [state.turns for state in memory._states] == [5, 6, 7, 8]
    pool = memory._states[-1].pool.store
    assert pool.blocks.held <= LAYERS * STATES * 3
    # a turn asked in other words, left and then asked to its end
    for end in (False, True):
        memory.behind(6)
        changed = [*ids[:420], *range(5000, 5300)]
        cache, (known,) = memory.begin(SHAPE, [900] * LAYERS, [keys(changed)[:-1]])
        assert known == 420 and isinstance(cache, PagedCache)
        assert all(torch.equal(cache.view(layer).keys, after[6][2 * layer]) for layer in range(LAYERS))
        store(cache, known, len(changed) - known, 4)
        memory.learn(cache, [keys(changed)])
        if not end:
            assert all(map(torch.equal, held(memory), after[8]))
        else:
            memory.said([1])
    assert [state.turns for state in memory._states] == [5, 6, 7]
    # what lies further back is read anew
    memory.dropped(2)
    memory.behind(2)
    assert memory.begin(SHAPE, [300] * LAYERS, [keys(ids[:200])])[1] == [0]


def test_keys_of_words_one_by_one_go_on_from_any_of_them() -> None:
    whole = keys(range(10))
    assert len(set(whole)) == 10 and whole[:6] == keys(range(6)) and digest(b"root") not in whole
