"""What is read of a remembered block, and the scores that say so, against loops and the published figures."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmsdk.errors import BudgetError, InputError
from mmsdk.kv.parts import Block, Part, whole
from mmsdk.kv.readers import BlockQueue, smoothed
from mmsdk.kv.selection import BlockLayout, Selection, quotas

LAYOUT = BlockLayout(cameras=(5, 4), words=2)


def block(rows: int = 2, layout: BlockLayout = LAYOUT) -> Block:
    valid = torch.ones(rows, layout.slots, dtype=torch.bool)
    return Block(torch.zeros(3, rows, 1, layout.slots, 2), torch.zeros(3, rows, 1, layout.slots, 2), valid, 0.0)


def test_seven_tenths_of_three_cameras_are_538_slots() -> None:
    assert Selection().budget(BlockLayout()) == 538
    assert quotas((256, 256, 256), 538, 4) == (180, 179, 179)
    index = Selection().index(torch.rand(1, 968), torch.ones(1, 968, dtype=torch.bool), BlockLayout())
    assert index.shape == (1, 538 + 200) and index[0, -200:].tolist() == list(range(768, 968))


def test_a_reserve_that_does_not_fit_is_dealt_in_turn() -> None:
    assert quotas((9, 9, 9), 7, 4) == (3, 2, 2)
    assert quotas((1, 9, 9), 6, 4) == (1, 3, 2)


@settings(max_examples=60, deadline=None)
@given(cameras=st.lists(st.integers(1, 40), min_size=1, max_size=4), share=st.floats(0.01, 1), reserve=st.integers(0, 6))
def test_quotas_meet_the_budget_and_no_camera_gives_more_than_it_has(cameras: list[int], share: float, reserve: int) -> None:
    budget = max(1, int(share * sum(cameras)))
    found = quotas(cameras, budget, reserve)
    assert sum(found) == budget and all(0 <= count <= slots for count, slots in zip(found, cameras, strict=True))
    floors = [min(reserve, slots) for slots in cameras]
    if sum(floors) <= budget:
        left = [slots - floor for slots, floor in zip(cameras, floors, strict=True)]
        for count, floor, slots in zip(found, floors, left, strict=True):
            exact = floor + (Fraction((budget - sum(floors)) * slots, sum(left)) if sum(left) else 0)
            assert abs(count - exact) < 1


def test_the_best_of_every_camera_are_read_and_of_equals_the_earlier() -> None:
    scores = torch.tensor([[0.1, 0.5, 0.2, 0.2, 0.2, 0.9, 0.0, 0.8, 0.8, 0.0, 0.0]])
    found = Selection(tokens=5, reserve=0).index(scores, torch.ones(1, 11, dtype=torch.bool), LAYOUT)
    assert quotas(LAYOUT.cameras, 5, 0) == (3, 2)
    assert found.tolist() == [[1, 2, 3, 5, 7, 9, 10]]


def test_a_masked_cameras_share_goes_to_nobody() -> None:
    valid = torch.tensor([[False] * 5 + [True] * 6, [True, False, True, True, True] + [True] * 6])
    found = Selection(tokens=5, reserve=0).index(torch.zeros(2, 11), valid, LAYOUT)
    assert found.shape == (2, 7)
    assert valid.gather(1, found).sum(1).tolist() == [4, 7]
    # invalid slots come last in their camera
    assert found[1, :3].tolist() == [0, 2, 3]


def test_scores_are_smoothed_where_something_was_observed_and_nowhere_else() -> None:
    scores = torch.full((2, 1, 4), 0.5)
    index, valid = torch.tensor([[0, 2, 3]]), torch.tensor([[True, True, False]])
    found = smoothed(scores, index, valid, torch.ones(2, 1, 3), 0.2)
    torch.testing.assert_close(found, torch.tensor([0.9, 0.5, 0.9, 0.5]).expand(2, 1, 4))


def test_consumers_keep_scores_of_their_own_and_a_block_takes_its_scores_along() -> None:
    queue, selection = BlockQueue(2), Selection(tokens=5)
    queue.push(block())
    parts = queue.parts("slow", selection, LAYOUT)
    received = torch.arange(parts[0].index.numel() * 3).view(3, 2, -1) / 100
    queue.observe("slow", parts, received, 0.2)
    assert float(queue.entries[0].score("slow").sum()) > 0
    assert float(queue.entries[0].score("prefill").sum()) == 0
    first = queue.entries[0]
    queue.push(block())
    queue.observe("prefill", [whole(queue.entries[1].block)], torch.ones(3, 2, 11), 0.2)
    # the other consumer, and the block that was not observed, are as they were
    assert queue.entries[0] is first
    queue.push(block())
    assert len(queue) == 2 and queue.entries[0].block is not first.block
    torch.testing.assert_close(queue.entries[0].score("prefill"), torch.full((3, 2, 11), 0.8))
    queue.clear()
    assert len(queue) == 0 and queue.nbytes == 0


def test_a_read_follows_the_largest_score_over_the_layers() -> None:
    queue, received = BlockQueue(2), torch.zeros(3, 2, 11)
    queue.push(block())
    received[0, 0, 4], received[2, 0, 1], received[1, 1, 3] = 0.9, 0.8, 0.3
    queue.observe("fast", [whole(queue.entries[0].block)], received, 0.2)
    index = queue.parts("fast", Selection(tokens=3, reserve=0), LAYOUT)[0].index
    assert index.tolist() == [[1, 4, 5, 9, 10], [0, 3, 5, 9, 10]]


def test_every_block_and_row_is_chosen_from_for_itself() -> None:
    """Three blocks of two rows, with slots that hold nothing: what is taken of one is what its scores alone say."""
    queue, selection, generator = BlockQueue(3), Selection(tokens=5, reserve=1), torch.Generator().manual_seed(0)
    for number in range(3):
        one = block()
        one.valid[number % 2, 2 * number : 2 * number + 2] = False
        queue.push(one)
    parts = queue.parts("slow", Selection(ratio=1.0), LAYOUT)
    queue.observe("slow", parts, torch.rand(3, 2, 33, generator=generator), 0.2)
    for entry, part in zip(queue.entries, queue.parts("slow", selection, LAYOUT), strict=True):
        assert part.block is entry.block and part.index.shape == (2, 7)
        for row in range(2):
            worth, valid = entry.score("slow")[:, row].amax(0), entry.block.valid[row]
            best = list[int]()
            for (first, count), quota in zip(((0, 5), (5, 4)), quotas(LAYOUT.cameras, 5, 1), strict=True):
                real = [slot for slot in range(first, first + count) if valid[slot]]
                real.sort(key=lambda slot, worth=worth: -float(worth[slot]))
                best += sorted(real[:quota])
            taken = [slot for slot in part.index[row].tolist() if valid[slot]]
            assert taken == [*best, 9, 10]


def test_blocks_evicted_since_a_read_are_passed_over() -> None:
    queue, stranger = BlockQueue(1), whole(block())
    queue.push(block())
    queue.observe("fast", [stranger], torch.ones(3, 2, 11), 0.2)
    assert not queue.entries[0].scores


def test_a_full_read_copies_nothing() -> None:
    queue = BlockQueue(1)
    queue.push(block())
    part: Part = queue.parts("slow", Selection(ratio=1.0), LAYOUT)[0]
    stored: Tensor = queue.entries[0].block.keys
    assert part.keys(2).data_ptr() == stored[2].data_ptr()


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(BudgetError, match="ratio is in"):
        Selection(ratio=0.0)
    with pytest.raises(BudgetError, match="10 tokens of a block, which has 9"):
        Selection(tokens=10).budget(LAYOUT)
    with pytest.raises(InputError, match="needs 1"):
        BlockQueue(0)
