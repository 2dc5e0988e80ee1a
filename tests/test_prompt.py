"""Prompts and layouts, without a model: who stands where, and how many there are."""

import inspect

import pytest
import torch

from mmsdk.errors import InputError, ModelError
from mmsdk.prompt import LAST, Ids, Layout, Learned, Prompt, Slot, Text
from mmsdk.vision.types import Image, Video


def image(height: int, width: int) -> Image:
    return Image(torch.zeros(3, height, width, dtype=torch.uint8), f"{height}x{width}")


def test_media_keep_the_order_of_their_segments() -> None:
    """PB-05: order by segment, not by size or kind."""
    clip = Video(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0.0, 1.0]))
    large, tiny = image(900, 1200), image(1, 1)
    assert Prompt((large, Text("then"), tiny, clip, Text("which?"))).media == (large, tiny, clip)
    assert Prompt((tiny, clip, Text("then"), large)).media == (tiny, clip, large)
    assert Prompt((Text("then"), large, Text("which?"))).text == "then\nwhich?"


@pytest.mark.parametrize("question", ["", "  \n", "caf\udce9?"])
def test_an_empty_or_broken_question_is_refused(question: str) -> None:
    with pytest.raises(InputError, match="question"):
        Prompt.of([image(4, 4)], question)


@pytest.mark.parametrize("question", [5, ["What?"], b"What?", None])
def test_a_question_that_is_no_string_is_refused(question: object) -> None:
    with pytest.raises(InputError, match=f"question: it is {type(question).__name__}, expected a string"):
        # without the check of types that tests add
        inspect.unwrap(Prompt.of)([image(4, 4)], question)  # type: ignore[arg-type]  # the mistake under test


def test_counts_and_positions_come_from_the_layout() -> None:
    """PB-02: exactly 64 and the fixed separators for each image."""
    layout = Layout((Ids((1,)), Slot(0), Ids((9,)), Slot(1), Ids((9,)), Slot(2), Ids((5, 6, 7))), media=3)
    assert layout.fixed == 6 and layout.length([64, 64, 64]) == 3 * 64 + 6
    assert layout.positions([64, 64, 64]).tolist() == list(range(198))
    assert layout.visual([2, 1, 0]).tolist() == [False, True, True, False, True, False, False, False, False]


def test_embeddings_stand_where_the_layout_says() -> None:
    layout = Layout((Ids((1,)), Slot(1), Ids((2, 3)), Slot(0)), media=2)
    table = torch.arange(8.0)[:, None].expand(8, 2)
    sight = [torch.full((2, 2), 50.0), torch.full((1, 2), 60.0)]
    built = layout.embed(sight, lambda ids: table[ids], torch.device("cpu"))
    assert built[:, 0].tolist() == [1.0, 60.0, 2.0, 3.0, 50.0, 50.0]


@pytest.mark.parametrize("counts", [(3, 0, 2), (0, 0, 1), (1, 1, 1), (0, 0, 0)])
def test_a_time_in_words_stays_before_what_is_left_of_its_frame(counts: tuple[int, ...]) -> None:
    """VI-11: frames with their times written between them, some tokens pruned, also all of a frame's."""
    between = [span for frame in range(3) for span in (Ids((10 + frame, 9)), Slot(frame))]
    layout = Layout((Ids((1,)), *between, Ids((5,))), media=3)
    sight = [torch.full((count, 2), 100.0 + frame) for frame, count in enumerate(counts)]
    built = layout.embed(sight, lambda ids: ids[..., None].expand(-1, -1, 2).float(), torch.device("cpu"))
    expected = [1, *(token for frame, count in enumerate(counts) for token in [10 + frame, 9, *[100 + frame] * count]), 5]
    assert built[:, 0].tolist() == expected
    assert layout.positions(counts).tolist() == list(range(len(expected)))
    assert layout.visual(counts).tolist() == [token >= 100 for token in expected]


@pytest.mark.parametrize("left", [((), (), ()), ((0, 1, 2), (), (3,)), ((2,), (0, 3), (1, 2, 3)), ((0, 1, 2, 3),) * 3])
def test_pp_06_what_is_left_of_timestamped_frames_keeps_its_places(left: tuple[tuple[int, ...], ...]) -> None:
    """PP-06: none to all of each frame's four tokens; words follow in order, none where they did not stand, and no position twice."""
    between = [span for frame in range(3) for span in (Ids((10 + frame, 9)), Slot(frame))]
    layout = Layout((Ids((1,)), *between, Ids((5, 6))), media=3)
    full = layout.positions([4, 4, 4]).tolist()
    there = [True, *(here for kept in left for here in (True, True, *(i in kept for i in range(4)))), True, True]
    places = [torch.tensor(kept, dtype=torch.int64) for kept in left]
    assert layout.positions([4, 4, 4], places).tolist() == [position for position, here in zip(full, there, strict=True) if here]
    assert layout.positions([len(kept) for kept in left]).tolist() == list(range(sum(there)))


@pytest.mark.parametrize("slots", [(), (0,), (0, 0), (0, 2)])
def test_a_layout_that_disagrees_with_its_prompt_is_refused(slots: tuple[int, ...]) -> None:
    """PB-02: a family's mistake is an error, not an off-by-one."""
    with pytest.raises(ModelError, match="slots"):
        Layout(tuple(Slot(i) for i in slots), media=2)


def test_counts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match="2 visual inputs"):
        Layout((Slot(0), Slot(1)), media=2).length([4])


def test_parts_of_an_input_stand_where_their_cells_are() -> None:
    """PB-05: two rows of three cells, a vector behind each, a word between; whatever is kept stays in its row, and a row may be empty."""
    newline = Learned(torch.full((1, 2), 9.0))
    layout = Layout((Ids((1,)), Slot(0, 0, 3), newline, Ids((2,)), Slot(0, 3, LAST), newline), media=1)
    assert layout.fixed == 4 and layout.lengths([6]) == [1, 3, 1, 1, 3, 1]
    for cells in ((0, 1, 2, 3, 4, 5), (1, 4, 5), (3,), (0, 2), ()):
        kept = torch.tensor(cells, dtype=torch.int64)
        resolved = layout.resolved([kept])
        first = sum(cell < 3 for cell in cells)
        assert resolved.lengths([len(cells)]) == [1, first, 1, 1, len(cells) - first, 1]
        sight = torch.stack((kept, kept), dim=1).float()
        built = resolved.embed([sight], lambda ids: ids[..., None].expand(-1, -1, 2).float() + 50, torch.device("cpu"))
        upper, lower = [cell for cell in cells if cell < 3], [cell for cell in cells if cell >= 3]
        assert built[:, 0].tolist() == [51, *upper, 9, 52, *lower, 9]
        assert resolved.visual([len(cells)]).sum() == len(cells)
        # of all six, those kept stand where they would among the others
        there = layout.resolved([torch.arange(6)]).positions([6], [kept])
        assert there.tolist() == [0, *(1 + cell for cell in upper), 4, 5, *(3 + cell for cell in lower), 9]


@pytest.mark.parametrize(
    "slots", [(Slot(0, 0, 3),), (Slot(0, 1),), (Slot(0, 0, 3), Slot(0, 4)), (Slot(0, 3), Slot(0, 0, 3)), (Slot(0, 0, 3), Slot(0, 3, 1))]
)
def test_parts_that_do_not_cover_their_input_in_order_are_refused(slots: tuple[Slot, ...]) -> None:
    with pytest.raises(ModelError, match="slots"):
        Layout(slots, media=1)
