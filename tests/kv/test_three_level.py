"""The memory of three levels: what it holds at which length, and that shares of it never meet."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


def test_cutting_goes_back_to_a_mark_and_leaves_forks_alone() -> None:
    cache = ThreeLevelCache.allocate(PLAN, 2, 100, torch.float32, "cpu")
    plain = cache.nbytes
    for end in (0, 5, 13, 30):
        store(cache, torch.arange(int(cache.position[0]), end).expand(2, -1))
        cache.mark()
    child = cache.fork()
    assert cache.cut(40) == 30 and cache.cut(30) == 30
    store(cache, torch.arange(30, 41).expand(2, -1))
    assert cache.levels()["marks"] == cache.nbytes - plain > 0
    # 21 were read behind 13, but nobody marked them
    assert cache.cut(21) == 13
    check(cache, [13, 13])
    store(cache, torch.arange(13, 22).expand(2, -1))
    check(cache, [22, 22])
    check(child, [30, 30])
    assert cache.cut(4) == 0 and cache.position.tolist() == [0, 0]
    store(cache, torch.arange(9).expand(2, -1))
    check(cache, [9, 9])
    check(child, [30, 30])


def test_of_many_marks_the_last_are_kept() -> None:
    cache = ThreeLevelCache.allocate(PLAN, 1, 1, torch.float32, "cpu")
    for step in range(12):
        store(cache, torch.arange(step, step + 1)[None])
        cache.mark()
        cache.mark()
    held = cache.levels()["marks"]
    # eight of them: at 5 to 12 tokens
    assert cache.cut(5) == 5 and cache.levels()["marks"] == held // 8
    assert cache.cut(4) == 0 and "marks" not in cache.levels()


@pytest.mark.usefixtures("poisoned")
def test_joined_rows_go_on_as_they_would_alone() -> None:
    parts = []
    for lengths in ([3], [29, 40], [8]):
        cache = ThreeLevelCache.allocate(PLAN, len(lengths), 64, torch.float32, "cpu")
        positions = torch.arange(max(lengths)).expand(len(lengths), -1)
        store(cache, torch.where(positions < torch.tensor(lengths)[:, None], positions, -1))
        parts.append(cache)
    lengths = [3, 29, 40, 8]
    together = ThreeLevelCache.joined(parts)
    check(together, lengths)
    assert all(together.entries(layer, 0).isfinite().all() for layer in (1, 2))
    for steps in (1, 6, 9):
        store(together, torch.tensor(lengths)[:, None] + torch.arange(steps))
        lengths = [length + steps for length in lengths]
        check(together, lengths)
    check(parts[1], [29, 40])
    assert together.span == sum(3 * WINDOW + 2 * (length // 4) + length // 8 for length in lengths)
    with pytest.raises(InputError, match="different models"):
        ThreeLevelCache.joined([parts[0], ThreeLevelCache.allocate(Plan(2, 2, ((),)), 1, 1, torch.float32, "cpu")])


@pytest.mark.usefixtures("poisoned")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_sequence_of_operations_holds_what_was_stored(data: st.DataObject) -> None:
    """Passes with padding and empty rows, forks, rows, joins; each cache then holds its own tokens and nothing else."""
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    rows = number(1, 3)
    caches = [(ThreeLevelCache.allocate(PLAN, rows, 1, torch.float32, "cpu"), [0] * rows)]
    for _ in range(number(1, 10)):
        place, kind = number(0, len(caches) - 1), number(0, 6)
        cache, lengths = caches[place]
        if kind <= 3:
            seen = torch.rand(len(lengths), number(1, 20), generator=torch.Generator().manual_seed(number(0, 99)))
            # some rows are all padding
            real = (seen > 0.2) & torch.tensor([[number(0, 3) > 0] for _ in lengths])
            store(cache, torch.where(real, torch.tensor(lengths)[:, None] + real.cumsum(1) - 1, -1))
            caches[place] = cache, [length + int(more) for length, more in zip(lengths, real.sum(1), strict=True)]
        elif kind == 4 and len(caches) < 4:
            caches.append((cache.fork(), list(lengths)))
        elif kind == 5 and len(caches) < 4:
            chosen = [number(0, len(lengths) - 1) for _ in range(number(1, 3))]
            caches.append((cache.select(torch.tensor(chosen)), [lengths[row] for row in chosen]))
        elif kind == 6 and len(caches) < 4:
            other = caches[number(0, len(caches) - 1)]
            caches.append((ThreeLevelCache.joined([cache, other[0]]), [*lengths, *other[1]]))
        for one, counts in caches:
            check(one, counts)
            assert all(one.entries(layer, 0).isfinite().all() for layer in (1, 2))


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
