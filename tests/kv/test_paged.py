"""What the paged cache promises beyond the others: blocks shared, written by their owner alone, and back in the pool whatever happens."""

import gc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kv.blocks import PoolFullError
from mmsdk.kv.memory import PagedMemory
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.pages import Pages, RowPages
from mmsdk.kv.shape import Shape
from mmsdk.kv.sheet import Sheet
from mmsdk.kv.types import KVCache, LayerView, PagedView

LAYERS, HEADS, WIDTH = 3, 2, 4


def pool(columns: int = 64, page: int = 16) -> Pages:
    return Pages(LAYERS, HEADS, WIDTH, columns, torch.float32, "cpu", page)


def store(cache: PagedCache, positions: Tensor, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shape = positions.shape[0], HEADS, positions.shape[1], WIDTH
    pairs = [(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in range(LAYERS)]
    cache.advance(positions)
    for layer, (keys, values) in enumerate(pairs):
        cache.append(layer, keys, values)
    return pairs


def test_it_is_a_cache() -> None:
    assert isinstance(PagedCache.empty(pool(), 1), KVCache)


def test_the_first_tokens_are_seen_as_they_come_and_later_ones_where_they_lie() -> None:
    cache = PagedCache.empty(pool(), 1)
    cache.advance(torch.arange(3)[None])
    keys = torch.randn(1, HEADS, 3, WIDTH)
    first = cache.append(0, keys, keys)
    assert isinstance(first, LayerView) and first.keys.data_ptr() == keys.data_ptr() and first.ordered
    cache.advance(torch.tensor([[3]]))
    later = cache.append(0, keys[:, :, :1], keys[:, :, :1])
    assert isinstance(later, PagedView) and later.keys.data_ptr() == cache.append(0, keys[:, :, :1], keys[:, :, :1]).keys.data_ptr()
    assert later.stretches == (((0, 4),),)


def test_padding_takes_no_block_and_a_mixed_load_fills_them() -> None:
    """Rows of many lengths, padded in front as a batch is, use at least 95 % of the slots that they hold."""
    lengths = [700, 33, 411, 128, 950, 270, 64, 512]
    pages = pool(256)
    cache = PagedCache.empty(pages, len(lengths))
    positions = (torch.arange(max(lengths)) - (max(lengths) - torch.tensor(lengths))[:, None]).clamp_min(-1)
    store(cache, positions)
    assert pages.blocks.held == LAYERS * sum(-(-length // 16) for length in lengths)
    assert cache.utilisation >= 0.95
    assert cache.nbytes == pages.block_bytes * pages.blocks.held


def test_a_row_grows_by_a_block_and_nothing_is_moved() -> None:
    pages = pool(8)
    cache = PagedCache.empty(pages, 1)
    (pair, *_) = store(cache, torch.arange(16)[None])
    before = pages.keys.data_ptr(), cache.columns(0)
    store(cache, torch.tensor([[16]]), 1)
    assert pages.keys.data_ptr() == before[0] and cache.columns(0)[:1] == before[1] and len(cache.columns(0)) == 2
    assert torch.equal(cache.view(0).keys[:, :, :16], pair[0])


def test_a_fork_shares_every_block_and_copies_only_the_one_it_writes_into() -> None:
    pages = pool(16)
    cache = PagedCache.empty(pages, 1)
    store(cache, torch.arange(40)[None])
    held, child = pages.blocks.held, cache.fork()
    assert pages.blocks.held == held and child.columns(0) == cache.columns(0)
    store(child, torch.tensor([[40]]), 1)
    assert child.columns(0)[:2] == cache.columns(0)[:2] and child.columns(0)[2] != cache.columns(0)[2]
    assert pages.blocks.held == held + LAYERS
    store(cache, torch.tensor([[40]]), 2)
    assert pages.blocks.held == held + LAYERS


def test_what_breaks_off_a_cache_over_kept_blocks_holds_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C or a full memory does once the blocks of a known prompt are held, and before anyone has the cache."""
    pages = pool()
    columns = pages.blocks.take(range(LAYERS), 2)

    def broken(sheet: Sheet) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Sheet, "_locate", broken)
        with pytest.raises(KeyboardInterrupt):
            PagedCache.of(pages, [RowPages(columns, 32)])
    gc.collect()
    assert not any(pages.blocks.shared(range(LAYERS), column) for column in columns)
    cache = PagedCache.of(pages, [RowPages(columns, 32)])
    assert all(pages.blocks.shared(range(LAYERS), column) for column in columns)
    cache.release()
    pages.blocks.give(range(LAYERS), columns)
    assert pages.blocks.held == 0


def test_what_a_full_pool_refuses_leaves_the_cache_as_it_was() -> None:
    pages = pool(3)
    cache = PagedCache.empty(pages, 2)
    store(cache, torch.arange(16).expand(2, -1))
    before = cache.view(1)
    assert not cache.fits(1)
    with pytest.raises(PoolFullError):
        cache.advance(torch.full((2, 1), 16))
    after = cache.view(1)
    assert cache.position.tolist() == [16, 16] and torch.equal(before.keys, after.keys) and torch.equal(before.positions, after.positions)
    one = cache.select(torch.tensor([0]))
    cache.release()
    store(one, torch.tensor([[16]]))
    assert one.view(0).positions.tolist() == [list(range(17))]


def test_keep_that_finds_no_block_changes_nothing() -> None:
    pages = pool(1)
    cache = PagedCache.empty(pages, 1)
    store(cache, torch.arange(8)[None])
    child, before = cache.fork(), cache.view(0).keys
    with pytest.raises(PoolFullError):
        child.keep(0, torch.tensor([[0, 1]]))
    assert torch.equal(child.view(0).keys, before) and torch.equal(cache.view(0).keys, before)


def test_keep_gives_blocks_of_its_layer_back() -> None:
    pages = pool(4)
    cache = PagedCache.empty(pages, 1)
    store(cache, torch.arange(40)[None])
    cache.keep(1, torch.tensor([[0, 5, 39]]))
    assert pages.blocks.held == 3 + 1 + 3 and cache.view(1).positions.tolist() == [[0, 5, 39]]


def test_rows_of_several_caches_become_one_batch() -> None:
    pages = pool()
    caches, wanted = [], []
    for seed, length in enumerate((5, 40, 17)):
        one = PagedCache.empty(pages, 1)
        wanted.append(store(one, torch.arange(length)[None], seed)[2][0])
        caches.append(one)
    held, batch = pages.blocks.held, PagedCache.joined(caches)
    assert pages.blocks.held == held and batch.position.tolist() == [5, 40, 17]
    (*_, (new, _)) = store(batch, torch.tensor([[5], [40], [17]]), 9)
    view = batch.view(2)
    for row, keys in enumerate(wanted):
        assert torch.equal(view.keys[row][:, view.valid[row]], torch.cat((keys[0], new[row]), dim=1))
    assert [one.position.tolist() for one in caches] == [[5], [40], [17]]
    with pytest.raises(InputError, match="pools"):
        PagedCache.joined([caches[0], PagedCache.empty(pool(), 1)])


def test_ka_16_blocks_of_four_samples_are_freed_once_by_the_last() -> None:
    pages = pool()
    prompt = PagedCache.empty(pages, 1)
    store(prompt, torch.arange(32)[None])
    samples = [prompt.fork() for _ in range(4)]
    prompt.release()
    for seed, one in enumerate(samples):
        store(one, torch.tensor([[32]]), seed)
    assert pages.blocks.held == LAYERS * (2 + 4)
    samples[0].release()
    samples[0].release()
    assert pages.blocks.held == LAYERS * (2 + 3)
    for one in samples:
        one.release()
    assert pages.blocks.held == 0


def test_cs_11_a_cache_that_dies_by_an_error_gives_its_blocks_back() -> None:
    pages = pool()

    def broken() -> None:
        cache = PagedCache.empty(pages, 2)
        store(cache, torch.arange(20).expand(2, -1))
        raise InputError("the client went away")

    with pytest.raises(InputError):
        broken()
    gc.collect()
    assert pages.blocks.held == 0


def act(draw: Callable[[st.SearchStrategy[int]], int], pages: Pages, caches: list[PagedCache]) -> None:
    """One thing that happens to requests: one begins, goes on, splits, is thinned, joins others, ends."""
    number = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    kind = number(0, 6)
    if kind == 0 or not caches:
        caches.append(PagedCache.empty(pages, number(1, 3)))
        return
    place = number(0, len(caches) - 1)
    cache = caches[place]
    rows = cache.position.shape[0]
    if kind <= 2:
        positions = cache.position[:, None] + torch.arange(number(1, 6))
        positions[number(0, rows - 1), : number(0, positions.shape[1])] = -1
        store(cache, positions)
    elif kind == 3:
        caches.append(cache.fork())
    elif kind == 4:
        caches.append(cache.select(torch.tensor([number(0, rows - 1) for _ in range(number(1, 2))])))
    elif kind == 5:
        held = cache.view(1).keys.shape[2]
        cache.keep(1, torch.arange(held)[number(0, 1) :: 2].expand(rows, -1))
    else:
        caches.pop(place).release()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ka_15_block_counts_return_to_the_start_whatever_happens(data: st.DataObject) -> None:
    pages, caches = pool(12, page=2), list[PagedCache]()
    for _ in range(data.draw(st.integers(1, 20))):
        try:
            act(data.draw, pages, caches)
        except PoolFullError:
            assert any(pages.blocks.free(range(layer, layer + 1)) < 12 for layer in range(LAYERS))
        used = sum(len(set(column)) for column in _columns(caches))
        assert pages.blocks.held == used
    caches.clear()
    if pages.blocks.held:
        # what still hangs in a cycle; looked for only then, as it takes a second late in a run
        gc.collect()
    assert pages.blocks.held == 0


def _columns(caches: list[PagedCache]) -> list[list[int]]:
    """The columns that all caches hold together, by layer."""
    rows = [(cache, row) for cache in caches for row in range(len(cache.position))]
    return [[column for cache, row in rows for column in cache.columns(row, layer)] for layer in range(LAYERS)]


@pytest.mark.parametrize("goes_on", [lambda cache: cache.select(torch.tensor([0, 1])), lambda cache: cache.fork()], ids=["select", "fork"])
def test_the_room_of_a_call_is_its_own_whichever_cache_of_it_goes_on(goes_on: Callable[[KVCache], KVCache]) -> None:
    memory, shape = PagedMemory(), Shape(LAYERS, HEADS, WIDTH, torch.float32, torch.device("cpu"))
    first, _ = memory.begin(shape, [160] * LAYERS, [()] * 4)
    left = goes_on(first)
    del first
    gc.collect()
    other, _ = memory.begin(shape, [2720] * LAYERS, [()])
    assert isinstance(left, PagedCache) and isinstance(other, PagedCache)
    other.reserve(2720)
    left.reserve(160)
