"""The memory of three levels: what it holds at which length, and that shares of it never meet."""

from collections.abc import Iterator

import pytest
import torch

from mmsdk.errors import InputError
from mmsdk.kv.open_windows import Series
from mmsdk.kv.three_level import Plan, ThreeLevelCache
from mmsdk.kv.types import KVCache

WIDTH, WINDOW = 4, 6
CSA, INDEX, HCA = Series("csa", WIDTH, 4, True), Series("indexer", 2, 4, True), Series("hca", WIDTH, 8, False)
PLAN = Plan(WINDOW, WIDTH, ((), (CSA, INDEX), (HCA,)))


def store(cache: ThreeLevelCache, positions: torch.Tensor) -> None:
    """Tokens that are their own position in every channel; an entry is the mean of its window."""
    cache.advance(positions)
    values = positions.float()[..., None].expand(-1, -1, WIDTH)
    for layer, series in enumerate(PLAN.series):
        cache.append(layer, values[:, None], values[:, None])
        for place, one in enumerate(series):
            content = positions.float()[..., None].expand(-1, -1, one.projected)
            done = cache.collect(layer, place, content, torch.zeros_like(content))
            if done is not None:
                cache.extend(layer, place, done, done.content[:, -done.count :, :, : one.width].mean(2))


def check(cache: ThreeLevelCache, lengths: list[int]) -> None:
    assert cache.position.tolist() == lengths
    for row, length in enumerate(lengths):
        view = cache.view(0)
        real = view.positions[row][view.valid[row]]
        assert real.tolist() == list(range(max(0, length - WINDOW), length)) and view.lengths[row] == len(real)
        assert torch.equal(view.keys[row, 0, view.valid[row], 0], real.float())
        for layer, series in enumerate(PLAN.series):
            for place, one in enumerate(series):
                own = cache.entries(layer, place)[row, : length // one.rate, 0]
                assert own.tolist() == [one.rate * window + (one.rate - 1) / 2 for window in range(length // one.rate)]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 8, 9, 40])
def test_every_window_becomes_one_entry_whatever_the_passes_are(chunk: int) -> None:
    cache = ThreeLevelCache.allocate(PLAN, 2, 1, torch.float32, "cpu")
    assert isinstance(cache, KVCache)
    for start in range(0, 40, chunk):
        stop = min(40, start + chunk)
        store(cache, torch.arange(start, stop).expand(2, -1))
        check(cache, [stop, stop])


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that was only allocated holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned")
def test_rows_of_any_length_keep_their_own_windows_and_show_nothing_else() -> None:
    cache, lengths, generator = ThreeLevelCache.allocate(PLAN, 3, 1, torch.float32, "cpu"), [0, 0, 0], torch.Generator().manual_seed(0)
    for _ in range(30):
        real = torch.rand(3, int(torch.randint(1, 9, (), generator=generator)), generator=generator) < torch.tensor([[0.2], [0.6], [1.0]])
        store(cache, torch.where(real, torch.tensor(lengths)[:, None] + real.cumsum(1) - 1, -1))
        lengths = [length + int(more) for length, more in zip(lengths, real.sum(1), strict=True)]
        check(cache, lengths)
        shown = [cache.entries(1, 0), cache.entries(1, 1), cache.entries(2, 0), cache.view(1).keys]
        assert all(entries.isfinite().all() for entries in shown)
    check(cache.select(torch.tensor([2, 0])), [lengths[2], lengths[0]])
    assert max(lengths) > 80 and min(lengths) < 40


def test_a_fork_and_its_parent_go_on_apart() -> None:
    cache = ThreeLevelCache.allocate(PLAN, 1, 100, torch.float32, "cpu")
    store(cache, torch.arange(11)[None])
    child = cache.fork()
    store(child, torch.arange(11, 30)[None])
    check(cache, [11])
    store(cache, torch.arange(11, 17)[None])
    check(cache, [17])
    check(child, [30])


def test_bytes_are_those_of_the_levels_and_the_window_never_grows() -> None:
    tokens, rows, size = 128 * 50, 2, 2
    plan = Plan(128, 16, ((), (Series("csa", 16, 4, True), Series("indexer", 8, 4, True)), (Series("hca", 16, 128, False),)))
    levels = ThreeLevelCache.allocate(plan, rows, tokens, torch.bfloat16, "cpu").levels()
    assert levels["csa"] == rows * tokens // 4 * 16 * size and levels["indexer"] == rows * tokens // 4 * 8 * size
    assert levels["hca"] == rows * tokens // 128 * 16 * size
    # one slot more takes what is not kept
    assert levels["window"] == rows * 3 * 129 * 16 * size
    longer = ThreeLevelCache.allocate(plan, rows, 10 * tokens, torch.bfloat16, "cpu").levels()
    assert longer["window"] == levels["window"] and longer["waiting"] == levels["waiting"]


def test_a_million_tokens_are_7812_far_entries_of_v4_flash() -> None:
    """Of the size of a checkpoint, without its memory."""
    hca = Series("hca", 512, 128, False)
    cache = ThreeLevelCache.allocate(Plan(128, 512, ((hca,),)), 1, 1_000_000, torch.bfloat16, "meta")
    assert cache.levels()["hca"] == 7812 * 512 * 2


def test_wrong_sizes_and_positions_are_named() -> None:
    with pytest.raises(InputError, match="rows"):
        ThreeLevelCache.allocate(PLAN, 0, 1, torch.float32, "cpu")
    cache = ThreeLevelCache.allocate(PLAN, 2, 1, torch.float32, "cpu")
    with pytest.raises(InputError, match="index 1.*go on from 0"):
        cache.advance(torch.tensor([[0, 1], [1, 2]]))
    with pytest.raises(InputError, match="rows"):
        cache.advance(torch.tensor([[0]]))
    with pytest.raises(InputError, match="layers"):
        cache.advance(torch.tensor([[0], [0]]), range(1))
    with pytest.raises(InputError, match="levels"):
        cache.keep(0, torch.zeros(2, 1, dtype=torch.long))
