"""Who holds which block, and where rows are put."""

import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmsdk.errors import InputError
from mmsdk.kv.blocks import Blocks, PoolFullError

ALL = range(2)


def test_taken_held_and_given_back() -> None:
    blocks = Blocks(2, 4)
    first = blocks.take(ALL, 3)
    assert first == [0, 1, 2] and blocks.free(ALL) == 1 and blocks.held == 6
    blocks.hold(ALL, first[:1])
    assert blocks.shared(ALL, 0) and not blocks.shared(ALL, 1)
    blocks.give(ALL, first)
    assert blocks.free(ALL) == 3 and not blocks.shared(ALL, 0)
    blocks.give(ALL, [0])
    assert blocks.held == 0


def test_a_full_pool_gives_nothing_and_says_so() -> None:
    blocks = Blocks(1, 2)
    blocks.take(range(1), 1)
    with pytest.raises(PoolFullError, match="2 blocks are wanted in layers 0 to 0, 1 are free"):
        blocks.take(range(1), 2)
    assert blocks.free(range(1)) == 1


def test_layers_that_hold_fewer_tokens_leave_blocks_to_others() -> None:
    blocks = Blocks(3, 4)
    blocks.take(range(2), 4)
    assert blocks.free(range(3)) == 0 and blocks.free(range(2, 3)) == 4
    assert blocks.take(range(2, 3), 2) == [0, 1]


def test_rows_that_grow_in_turn_stay_in_one_stretch() -> None:
    """Four rows in a pool with twice the room: each goes on in the neighbour of its last block."""
    blocks = Blocks(1, 64)
    rows = [blocks.take(range(1), 2) for _ in range(4)]
    for _ in range(6):
        for row in rows:
            row += blocks.take(range(1), 1, after=row[-1])
    assert all(row == list(range(row[0], row[0] + 8)) for row in rows)


def test_a_pool_in_pieces_is_used_to_the_last_block() -> None:
    blocks = Blocks(1, 8)
    taken = blocks.take(range(1), 8)
    blocks.give(range(1), taken[::2])
    assert sorted(blocks.take(range(1), 4)) == [0, 2, 4, 6]


def test_sizes_are_checked() -> None:
    with pytest.raises(InputError, match="columns"):
        Blocks(1, 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=30))
def test_ka_15_no_block_has_two_owners_and_all_come_back(acts: list[tuple[int, int]]) -> None:
    blocks, owned = Blocks(2, 12), list[list[int]]()
    kept = {0, 1, 5}
    for column in kept:
        blocks.keep(column, True)
    for kind, size in acts:
        if kind <= 1 and blocks.free(ALL) >= size:
            owned.append(blocks.take(ALL, size, after=owned[-1][-1] if owned and kind else -1))
        elif kind == 2 and owned:
            blocks.hold(ALL, owned[0])
            owned.append(list(owned[0]))
        elif kind == 3 and owned:
            blocks.give(ALL, owned.pop(size % len(owned)))
        holders = Counter(column for columns in owned for column in columns)
        assert blocks.free(ALL) == 12 - len(holders) and blocks.held == 2 * len(holders)
        if size == 5:
            column = len(acts) % 6
            blocks.keep(column, column not in kept)
            kept ^= {column}
        assert blocks.idle == 2 * sum(holders[column] == 1 for column in kept)
        assert all(blocks.shared(ALL, column) == (count > 1) for column, count in holders.items())
    for columns in owned:
        blocks.give(ALL, columns)
    assert blocks.held == 0


def test_threads_never_get_the_same_block() -> None:
    blocks, found = Blocks(1, 400), list[int]()

    def work() -> None:
        for _ in range(50):
            found.extend(blocks.take(range(1), 1))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(400))
