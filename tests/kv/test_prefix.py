"""Keys of blocks: equal where all is equal that a block depends on, different where anything is not; and what is kept of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmsdk.kv.blocks import Blocks
from mmsdk.kv.prefix import Look, Prefixes, Run, Words, chain, digest

PICTURE = Look(digest(b"picture"), 20)
PROMPT: list[Run] = [Words((1,)), PICTURE, Words(tuple(range(30)))]


def test_one_key_for_each_full_block_of_at_least_128_bits() -> None:
    keys = chain(b"root", PROMPT, 16)
    assert len(keys) == 51 // 16 and len(set(keys)) == 3 and {len(key) for key in keys} == {32}
    assert chain(b"root", [Words(tuple(range(15)))], 16) == []


def test_the_keys_of_a_beginning_are_those_of_the_whole() -> None:
    assert chain(b"root", [*PROMPT, Words((7,) * 40)], 16)[:3] == chain(b"root", PROMPT, 16)


@pytest.mark.parametrize(
    ("what", "other", "first"),
    [
        ("root", (b"another", PROMPT), 0),
        ("picture", (b"root", [Words((1,)), Look(digest(b"other"), 20), PROMPT[2]]), 0),
        ("tokens of the picture", (b"root", [Words((1,)), Look(PICTURE.key, 21), PROMPT[2]]), 1),
        ("first word", (b"root", [Words((2,)), *PROMPT[1:]]), 0),
        ("last word of the second block", (b"root", [*PROMPT[:2], Words((*range(10), 99, *range(11, 30)))]), 1),
        ("words for a picture", (b"root", [Words((1, *range(20))), PROMPT[2]]), 0),
    ],
)
def test_cs_06_any_change_changes_the_block_and_all_behind_it(what: str, other: tuple[bytes, list[Run]], first: int) -> None:
    ours, theirs = chain(b"root", PROMPT, 16), chain(*other, 16)
    assert ours[:first] == theirs[:first], what
    assert not set(ours[first:]) & set(theirs[first:]), what


def test_digests_know_where_a_part_ends() -> None:
    assert digest(b"ab", b"c") != digest(b"a", b"bc") != digest(b"abc")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8))
def test_cs_08_keys_agree_exactly_as_far_as_the_histories_do(one: list[int], other: list[int], page: int) -> None:
    ours, theirs = (chain(b"", [Words(tuple(ids))], page) for ids in (one, other))
    same = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert [a == b for a, b in zip(ours, theirs, strict=False)] == [place < same // page for place in range(min(len(ours), len(theirs)))]


def kept(columns: int = 8) -> tuple[Blocks, Prefixes]:
    blocks = Blocks(2, columns)
    return blocks, Prefixes(blocks, 2)


def test_what_is_learnt_is_found_and_stays_when_its_cache_has_gone() -> None:
    blocks, prefixes = kept()
    columns = blocks.take(range(2), 3)
    prefixes.learn([b"a", b"b", b"c"], columns)
    blocks.give(range(2), columns)
    assert blocks.held == prefixes.idle == 6
    assert prefixes.match([b"a", b"b", b"x"]) == columns[:2] and prefixes.match([b"x", b"b"]) == []
    assert blocks.held == prefixes.idle == 6
    prefixes.clear()
    assert blocks.held == 0


def test_the_longest_unused_goes_first_and_of_a_prompt_its_end() -> None:
    blocks, prefixes = kept()
    for name in (b"old", b"new"):
        columns = blocks.take(range(2), 3)
        prefixes.learn([name + bytes([i]) for i in range(3)], columns)
        blocks.give(range(2), columns)
    prefixes.evict(3)
    found = [len(prefixes.match([name + bytes([i]) for i in range(3)])) for name in (b"old", b"new")]
    assert blocks.free(range(2)) == 3 and found == [2, 3]


def test_what_someone_reads_is_not_evicted() -> None:
    blocks, prefixes = kept(4)
    columns = blocks.take(range(2), 4)
    prefixes.learn([bytes([i]) for i in range(4)], columns)
    blocks.give(range(2), columns[2:])
    prefixes.evict(4)
    assert len(prefixes) == 2 and blocks.free(range(2)) == 2
    assert prefixes.match([b"\0", b"\1"]) == columns[:2]


def test_cs_03_a_hundred_thousand_pictures_have_as_many_keys() -> None:
    pixels = torch.randint(0, 256, (100_000, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy()
    distinct = {row.tobytes() for row in pixels}
    assert len({digest(row) for row in distinct}) == len(distinct)
