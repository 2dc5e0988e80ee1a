"""Segments of thought: their kinds, what they keep, and who gives way."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmsdk.kv.segments import KEEPS, SEGMENT, fitted, kinds, lowered, ranks, sparsity


def test_sparsity_is_the_share_of_faint_weights_among_what_is_seen() -> None:
    weights = torch.tensor([[0.5, 0.004, 0.3, 0.0049], [0.25, 0.25, 0.25, 0.9], [0.0, 0.0, 0.0, 1.0]])
    seen = torch.tensor([[True, True, True, True], [True, True, True, False], [False, False, False, False]])
    assert sparsity(weights, seen).tolist() == [0.5, 0.0, 0.0]


def test_kinds_lie_between_their_borders() -> None:
    assert kinds(torch.tensor([0.95, 0.8, 0.79, 0.4, 0.39]), (0.4, 0.8)).tolist() == [0, 0, 2, 2, 1]


@pytest.mark.parametrize("count", [1, 3, 6])
def test_what_is_kept_first_differs_most_and_what_is_not_real_comes_last(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(6, 8, generator=generator)
    # six kinds of keys, four of each: the first six kept are one of every kind
    keys = (directions.repeat(4, 1) + 0.01 * torch.randn(24, 8, generator=generator))[None, None]
    valid = torch.ones(1, 24, dtype=torch.bool)
    rank = ranks(keys, valid)
    assert sorted(rank[0].tolist()) == list(range(24)) and int(rank[0, -1]) == 0
    chosen = torch.where(rank[0] < count)[0] % 6
    assert len(set(chosen.tolist())) == count
    valid[0, 20:] = False
    rank = ranks(keys, valid)
    assert int(rank[0, 19]) == 0 and sorted(rank[0, 20:].tolist()) == [20, 21, 22, 23]


def test_a_transition_lowers_what_came_before_it_and_nothing_else_does() -> None:
    levels = torch.tensor([[0, 2, 5, 6], [0, 2, 5, 6], [0, 2, 5, 6]])
    assert lowered(levels, torch.tensor([[0], [1], [2]])).tolist() == [[1, 3, 5, 6], [0, 2, 5, 6], [0, 2, 5, 6]]
    assert [KEEPS[level] for level in range(6)] == [SEGMENT, 64, 32, 16, 8, 4]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 600), st.integers(0, 1000))
def test_room_is_made_no_further_than_needed(n: int, room: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    levels, kind = torch.randint(0, 6, (2, n), generator=generator), torch.randint(0, 3, (2, n), generator=generator)
    held = torch.randint(0, SEGMENT + 1, (2, n), generator=generator)
    found = fitted(levels, kind, held, torch.tensor([room, room]))
    keeps = torch.tensor([*KEEPS, 0])
    kept = torch.minimum(keeps[found], held)
    assert (found >= levels).all() and (kept.sum(1) <= room).all()
    for row in range(2):
        if (found[row] > levels[row]).any():
            # the last step taken was needed: one segment a level higher, and it would not fit
            back = found[row] - (found[row] > levels[row]).long()
            higher = torch.minimum(keeps[back], held[row]) - kept[row]
            assert int(kept[row].sum() + higher.max()) > room


def test_transitions_give_way_before_execution_before_reasoning_and_the_older_of_equals() -> None:
    held, levels = torch.full((1, 4), SEGMENT), torch.zeros(1, 4, dtype=torch.long)
    kind = torch.tensor([[2, 1, 0, 0]])
    assert fitted(levels, kind, held, torch.tensor([4 * SEGMENT])).tolist() == [[0, 0, 0, 0]]
    assert fitted(levels, kind, held, torch.tensor([4 * SEGMENT - 1])).tolist() == [[0, 0, 1, 0]]
    assert fitted(levels, kind, held, torch.tensor([4 * SEGMENT - 128])).tolist() == [[0, 0, 1, 1]]
    assert fitted(levels, kind, held, torch.tensor([0])).tolist() == [[6, 6, 6, 6]]
