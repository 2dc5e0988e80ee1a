"""What the dense cache promises about memory, forks and rows; tests/contracts/test_caches.py holds it against lists of entries."""

import pytest
import torch
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.none import NoCache
from mmsdk.kv.types import KVCache

LAYERS, HEADS, WIDTH = 3, 2, 4


def empty(rows: int, capacity: int = 4) -> DenseCache:
    return DenseCache.allocate(LAYERS, rows, HEADS, WIDTH, capacity, torch.float32, "cpu")


def store(cache: KVCache, positions: Tensor, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Append random keys and values to every layer; returns them."""
    generator = torch.Generator().manual_seed(seed)
    shape = positions.shape[0], HEADS, positions.shape[1], WIDTH
    pairs = [(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in range(LAYERS)]
    cache.advance(positions)
    for layer, (keys, values) in enumerate(pairs):
        cache.append(layer, keys, values)
    return pairs


@pytest.mark.parametrize("cache", [empty(1), NoCache()])
def test_both_are_caches(cache: KVCache) -> None:
    assert isinstance(cache, KVCache)


def test_a_token_is_written_in_place_and_memory_doubles_only_when_full() -> None:
    cache = empty(2, capacity=8)
    places, sizes = [], []
    for step in range(17):
        store(cache, torch.full((2, 1), step), step)
        places.append(cache.view(0).keys.data_ptr())
        sizes.append(cache.nbytes)
    assert len(set(places[:8])) == len(set(places[8:16])) == 1
    assert sizes == [sizes[0]] * 8 + [2 * sizes[0]] * 8 + [4 * sizes[0]]


def test_a_view_is_no_copy() -> None:
    cache = empty(1)
    store(cache, torch.arange(3)[None], 0)
    assert (
        cache.view(1).keys.data_ptr()
        == cache.view(1).keys.data_ptr()
        == cache.append(1, *(2 * [torch.ones(1, HEADS, 3, WIDTH)])).keys.data_ptr()
    )


def test_ka_21_rows_selected_and_repeated_are_their_own() -> None:
    cache = empty(3)
    store(cache, torch.arange(3).expand(3, -1), 0)
    before = cache.view(0).keys.clone()
    copies = cache.select(torch.tensor([2, 2, 2]))
    assert all(torch.equal(copies.view(0).keys[row], before[2]) for row in range(3))
    ((new, _), *_) = store(copies, torch.full((3, 1), 3), 1)
    copies.view(0).keys[0].zero_()
    assert torch.equal(cache.view(0).keys, before)
    assert torch.equal(copies.view(0).keys[1, :, :3], before[2]) and torch.equal(copies.view(0).keys[1, :, 3], new[1, :, 0])


def test_ka_22_two_continuations_of_one_prefix_do_not_meet() -> None:
    cache = empty(1)
    store(cache, torch.arange(2)[None], 0)
    prefix = cache.view(2).values.clone()
    first, second = cache.fork(), cache.fork()
    shared = first.view(2).values.data_ptr() == cache.view(2).values.data_ptr()
    added = [store(one, torch.tensor([[2]]), seed)[2][1] for seed, one in enumerate((first, second, cache), start=5)]
    assert shared
    for one, new in zip((first, second, cache), added, strict=True):
        assert torch.equal(one.view(2).values, torch.cat((prefix, new), dim=2))


def test_keeping_in_the_parent_leaves_a_fork_as_it_was() -> None:
    cache = empty(1)
    store(cache, torch.arange(4)[None], 0)
    child, before = cache.fork(), cache.view(0).keys.clone()
    cache.keep(0, torch.tensor([[3]]))
    assert torch.equal(child.view(0).keys, before) and torch.equal(cache.view(0).keys, before[:, :, 3:])


def test_keep_makes_room_again() -> None:
    cache = empty(1, capacity=4)
    store(cache, torch.arange(4)[None], 0)
    size = cache.nbytes
    for layer in range(LAYERS):
        cache.keep(layer, torch.tensor([[0, 3]]))
    store(cache, torch.tensor([[4, 5]]), 1)
    assert cache.nbytes == size and cache.view(1).positions.tolist() == [[0, 3, 4, 5]] and cache.position.tolist() == [6]


def test_a_layer_that_is_given_fewer_tokens_needs_memory_for_those_alone() -> None:
    """PP-05: room for six tokens in the first two layers and for three in the last is enough, and no fork or row takes more."""
    cache = DenseCache.allocate(LAYERS, 1, HEADS, WIDTH, [6, 6, 3], torch.float32, "cpu")
    size = cache.nbytes
    for layers, positions in ((range(2), [0, 1, 2, 3, 4]), (range(2, 3), [0, 1]), (range(2), [5]), (range(2, 3), [2])):
        cache.advance(torch.tensor([positions]), layers)
        for layer in layers:
            new = torch.zeros(1, HEADS, len(positions), WIDTH)
            cache.append(layer, new, new)
    assert size == 2 * 4 * HEADS * WIDTH * (6 + 6 + 3)
    assert all(one.nbytes == size for one in (cache, cache.fork(), cache.select(torch.tensor([0]))))


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(InputError, match="capacity"):
        empty(1, capacity=0)
    with pytest.raises(InputError, match="2 for 3 layers"):
        DenseCache.allocate(LAYERS, 1, HEADS, WIDTH, [4, 4], torch.float32, "cpu")
    with pytest.raises(InputError, match="rows"):
        empty(2).advance(torch.zeros(3, 1, dtype=torch.long))


def test_no_cache_hands_back_what_it_is_given_with_its_gradient() -> None:
    cache, keys = NoCache(), torch.randn(1, HEADS, 3, WIDTH, requires_grad=True)
    cache.advance(torch.tensor([[-1, 0, 1]]))
    view = cache.append(0, keys, keys)
    assert view.keys is keys and view.lengths.tolist() == [2] and cache.position.tolist() == [2]
    with pytest.raises(InputError, match="DenseCache"):
        cache.view(0)
