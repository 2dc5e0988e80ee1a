"""What is left to each query by DeepSeek's indexer, against a search through all entries in plain Python."""

import pytest
import torch
from torch import Tensor

from mmsdk.attention import dsa
from mmsdk.attention.dsa import Lightning, narrowed
from mmsdk.attention.mask import Bias, Causal, Everything, Mask
from mmsdk.errors import ModelError
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.pages import Pages
from mmsdk.kv.types import LayerView, View

ROWS, HEADS, WIDTH, ENTRIES, TOPK = 2, 8, 6, 20, 4


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def view_of(keys: Tensor) -> LayerView:
    """Every entry's own number as its key, which tells it again."""
    positions = torch.arange(keys.shape[1]).expand(len(keys), -1)
    numbers = positions[:, None, :, None].float() + 1
    return LayerView(numbers, keys[:, None], positions, positions >= 0, torch.full((len(keys),), keys.shape[1]), True)


def best(query: Tensor, weights: Tensor, keys: Tensor, seen: list[int]) -> set[int]:
    """The entries of the largest sums over heads of w relu(q . k), among those that are seen at all."""
    scores = {j: sum(float(w) * max(0.0, float(q @ keys[j])) for q, w in zip(query, weights, strict=True)) for j in seen}
    return set(sorted(scores, key=lambda j: -scores[j])[:TOPK])


def told(view: LayerView, mask: Mask, row: int, query: int) -> set[int]:
    """The numbers of the entries that a query then sees."""
    numbers = view.keys[row, 0, :, 0] - 1
    if isinstance(mask, Bias):
        bias = mask.bias.expand(ROWS, -1, -1, -1)[row, 0, query]
        numbers = numbers[bias == 0] if bool(mask.alive.expand(ROWS, -1, -1, -1)[row, 0, query, 0]) else numbers[:0]
    return {int(number) for number in numbers}


PADDED = torch.ones(ROWS, ENTRIES, ENTRIES, dtype=torch.bool).tril()
PADDED[1, :, :6] = False
CASES: dict[str, tuple[int, Mask, Tensor]] = {
    "one of all": (1, Everything(), torch.ones(ROWS, 1, ENTRIES, dtype=torch.bool)),
    "one of some": (1, Bias.of(PADDED[:, None, -3:-2], torch.float32), PADDED[:, -3:-2]),
    "one of fewer than k": (1, Bias.of(PADDED[:, None, 7:8], torch.float32), PADDED[:, 7:8]),
    "one of none": (1, Bias.of(PADDED[:, None, :1] & False, torch.float32), PADDED[:, :1] & False),
    "a prompt": (ENTRIES, Causal(), torch.ones(ROWS, ENTRIES, ENTRIES, dtype=torch.bool).tril()),
    "a padded prompt": (ENTRIES, Bias.of(PADDED[:, None], torch.float32), PADDED),
    "a chunk for all rows": (5, Bias.of(PADDED[:1, None, -5:], torch.float32), PADDED[:1, -5:].expand(ROWS, -1, -1)),
}


@pytest.mark.parametrize("gpu", [False, True], ids=["processor", "as on a GPU"])
@pytest.mark.parametrize("slice_", [dsa._SLICE, 1])
@pytest.mark.parametrize("case", CASES)
def test_each_query_sees_its_best_entries_and_none_that_it_may_not(
    case: str, slice_: int, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the choice is the operation's, whose reference runs here."""
    monkeypatch.setattr(dsa, "_SLICE", slice_)
    monkeypatch.setattr(dsa, "launchable", lambda tensor: gpu)
    queries, mask, seen = CASES[case]
    query, weights, keys = (
        drawn(ROWS, queries, HEADS, WIDTH, seed=1),
        drawn(ROWS, queries, HEADS, seed=2),
        drawn(ROWS, ENTRIES, WIDTH, seed=3),
    )
    view, left = narrowed(query, weights, view_of(keys), mask, TOPK)
    assert view.keys.shape[2] == (TOPK if queries == 1 else ENTRIES)
    for row in range(ROWS):
        for place in range(queries):
            expected = best(query[row, place], weights[row, place], keys[row], seen[row, place].nonzero()[:, 0].tolist())
            assert told(view, left, row, place) == expected


def test_pages_give_the_same_entries_and_never_padding() -> None:
    keys, missing = drawn(ROWS, ENTRIES, WIDTH, seed=3), 17
    side_by_side = view_of(keys)
    pages = Pages(1, 1, (1, WIDTH), 14, torch.float32, "cpu", page=4)
    pages.keys.fill_(torch.nan)
    pages.values.fill_(torch.nan)
    cache, positions = PagedCache.empty(pages, ROWS), torch.arange(ENTRIES).repeat(ROWS, 1)
    positions[1] = (positions[1] - missing).clamp_min(-1)
    view: View = side_by_side
    for part in (slice(0, 18), slice(18, ENTRIES)):
        cache.advance(positions[:, part])
        view = cache.append(0, side_by_side.keys[:, :, part], side_by_side.values[:, :, part])
    query, weights = drawn(ROWS, 1, HEADS, WIDTH, seed=1), drawn(ROWS, 1, HEADS, seed=2)
    paged, mask = narrowed(query, weights, view, Everything(), TOPK)
    assert told(paged, mask, 0, 0) == best(query[0, 0], weights[0, 0], keys[0], list(range(ENTRIES)))
    assert told(paged, mask, 1, 0) == set(range(missing, ENTRIES))


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ModelError, match="topk is 0"):
        Lightning(8, 6, 0)
