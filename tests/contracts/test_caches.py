"""Every exact cache against lists of entries, and what all promise about forks and rows."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmsdk.kv.dense import DenseCache
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.pages import Pages
from mmsdk.kv.types import KVCache

LAYERS, HEADS, WIDTH = 3, 2, 4


def dense(rows: int) -> KVCache:
    return DenseCache.allocate(LAYERS, rows, HEADS, WIDTH, 4, torch.float32, "cpu")


def paged(rows: int) -> KVCache:
    """Blocks of two tokens, so that a few tokens fill some; the pool is new for every cache, and dies with the last that is made of it."""
    pages = Pages(LAYERS, HEADS, WIDTH, 400, torch.float32, "cpu", page=2)
    pages.keys.fill_(torch.nan)
    pages.values.fill_(torch.nan)
    return PagedCache.empty(pages, rows)


KINDS = pytest.mark.parametrize("make", [dense, paged])


def store(cache: KVCache, positions: Tensor, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Append random keys and values to every layer; returns them."""
    generator = torch.Generator().manual_seed(seed)
    shape = positions.shape[0], HEADS, positions.shape[1], WIDTH
    pairs = [(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in range(LAYERS)]
    cache.advance(positions)
    for layer, (keys, values) in enumerate(pairs):
        cache.append(layer, keys, values)
    return pairs


@dataclass
class Listed:
    """The same cache as lists: for every layer and row the (position, key, value) of its entries, padding included."""

    cache: KVCache
    entries: list[list[list[tuple[int, Tensor, Tensor]]]] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)

    @staticmethod
    def of(cache: KVCache, rows: int) -> "Listed":
        return Listed(cache, [[[] for _ in range(rows)] for _ in range(LAYERS)], [0] * rows)

    def append(self, padding: list[list[bool]], seed: int) -> None:
        positions = torch.full((len(padding), len(padding[0])), -1)
        for row, flags in enumerate(padding):
            for column, padded in enumerate(flags):
                if not padded:
                    positions[row, column] = self.seen[row]
                    self.seen[row] += 1
        for layer, (keys, values) in enumerate(store(self.cache, positions, seed)):
            for row in range(len(padding)):
                new = zip(positions[row].tolist(), keys[row].unbind(1), values[row].unbind(1), strict=True)
                self.entries[layer][row] += list(new)

    def keep(self, layer: int, index: Tensor) -> None:
        self.cache.keep(layer, index)
        for row, chosen in enumerate(index.tolist()):
            self.entries[layer][row] = [self.entries[layer][row][i] for i in chosen]

    def fork(self) -> "Listed":
        return Listed(self.cache.fork(), [[list(row) for row in layer] for layer in self.entries], list(self.seen))

    def select(self, rows: list[int]) -> "Listed":
        chosen = self.cache.select(torch.tensor(rows))
        return Listed(chosen, [[list(layer[row]) for row in rows] for layer in self.entries], [self.seen[row] for row in rows])

    def check(self) -> None:
        assert self.cache.position.tolist() == self.seen
        for layer, rows in enumerate(self.entries):
            view = self.cache.view(layer)
            assert view.positions.tolist() == [[position for position, _, _ in row] for row in rows]
            assert torch.equal(view.valid, view.positions >= 0)
            assert view.lengths.tolist() == [sum(position >= 0 for position, _, _ in row) for row in rows]
            assert not view.ordered or bool(view.valid.all() and (view.positions.diff() > 0).all())
            for row, items in enumerate(rows):
                real = [(i, key, value) for i, (position, key, value) in enumerate(items) if position >= 0]
                assert all(torch.equal(view.keys[row, :, i], key) for i, key, _ in real)
                assert all(torch.equal(view.values[row, :, i], value) for i, _, value in real)


def act(draw: Callable[[st.SearchStrategy[int]], int], caches: list[Listed], seed: int) -> None:
    """One random operation on one of the caches."""
    number = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    listed = caches[number(0, len(caches) - 1)]
    rows, kind = len(listed.seen), number(0, 4)
    if kind <= 1:
        steps = number(1, 5)
        listed.append([[number(0, 3) == 0 for _ in range(steps)] for _ in range(rows)], seed)
    elif kind == 2 and len(listed.entries[0][0]):
        layer = number(0, LAYERS - 1)
        held = len(listed.entries[layer][0])
        kept = number(1, held) if held else 0
        index = [sorted(torch.randperm(held, generator=torch.Generator().manual_seed(seed + row))[:kept].tolist()) for row in range(rows)]
        listed.keep(layer, torch.tensor(index, dtype=torch.long).view(rows, kept))
    elif kind == 3 and len(caches) < 4:
        caches.append(listed.fork())
    elif kind == 4 and len(caches) < 4:
        caches.append(listed.select([number(0, rows - 1) for _ in range(number(1, 3))]))


@KINDS
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_sequence_of_operations_holds_what_lists_hold(make: Callable[[int], KVCache], data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 3))
    caches = [Listed.of(make(rows), rows)]
    for step in range(data.draw(st.integers(1, 12))):
        act(data.draw, caches, 1000 * step)
        for listed in caches:
            listed.check()


@KINDS
def test_ka_21_rows_selected_and_repeated_are_their_own(make: Callable[[int], KVCache]) -> None:
    cache = make(3)
    store(cache, torch.arange(3).expand(3, -1), 0)
    before = cache.view(0).keys.clone()
    copies = cache.select(torch.tensor([2, 2, 2]))
    assert all(torch.equal(copies.view(0).keys[row], before[2]) for row in range(3))
    ((new, _), *_) = store(copies, torch.full((3, 1), 3), 1)
    copies.view(0).keys[0].zero_()
    assert torch.equal(cache.view(0).keys, before)
    assert torch.equal(copies.view(0).keys[1, :, :3], before[2]) and torch.equal(copies.view(0).keys[1, :, 3], new[1, :, 0])


@KINDS
def test_ka_22_two_continuations_of_one_prefix_do_not_meet(make: Callable[[int], KVCache]) -> None:
    cache = make(1)
    store(cache, torch.arange(3)[None], 0)
    prefix = cache.view(2).values.clone()
    first, second = cache.fork(), cache.fork()
    added = [store(one, torch.tensor([[3]]), seed)[2][1] for seed, one in enumerate((first, second, cache), start=5)]
    for one, new in zip((first, second, cache), added, strict=True):
        assert torch.equal(one.view(2).values, torch.cat((prefix, new), dim=2))


@KINDS
def test_keeping_in_the_parent_leaves_a_fork_as_it_was(make: Callable[[int], KVCache]) -> None:
    cache = make(1)
    store(cache, torch.arange(4)[None], 0)
    child, before = cache.fork(), cache.view(0).keys.clone()
    cache.keep(0, torch.tensor([[3]]))
    assert torch.equal(child.view(0).keys, before) and torch.equal(cache.view(0).keys, before[:, :, 3:])


@KINDS
def test_layers_may_be_given_different_tokens(make: Callable[[int], KVCache]) -> None:
    """PP-05: five to the first two layers, the first and the fourth of them to the last; then one to all, each counting its own."""
    cache = make(1)
    new = torch.randn(2, LAYERS, 1, HEADS, 6, WIDTH, generator=torch.Generator().manual_seed(0))
    cache.advance(torch.arange(5)[None], range(2))
    for layer in range(2):
        cache.append(layer, new[0, layer, ..., :5, :], new[1, layer, ..., :5, :])
    cache.advance(torch.tensor([[0, 1]]), range(2, 3))
    cache.append(2, new[0, 2, ..., [0, 3], :], new[1, 2, ..., [0, 3], :])
    assert cache.position.tolist() == [5] and [cache.next(layer).tolist() for layer in range(3)] == [[5], [5], [2]]
    assert cache.next(0) is cache.next(1) is not cache.next(2)
    cache.advance(torch.tensor([[5]]), range(2))
    cache.advance(torch.tensor([[2]]), range(2, 3))
    for layer in range(LAYERS):
        cache.append(layer, new[0, layer, ..., 5:, :], new[1, layer, ..., 5:, :])
    for one in (cache, cache.fork(), cache.select(torch.tensor([0]))):
        assert [one.view(layer).positions.tolist() for layer in range(3)] == [[[0, 1, 2, 3, 4, 5]]] * 2 + [[[0, 1, 2]]]
        assert all(one.view(layer).ordered for layer in range(3))
        assert torch.equal(one.view(2).keys, new[0, 2, ..., [0, 3, 5], :]) and torch.equal(one.view(1).values, new[1, 1])
        assert one.next(0) is one.next(1) and one.next(2).tolist() == [3]
