"""The explaining picture shows what it claims: dropped patches dark, kept ones bright, important ones warm."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from mmsdk.answer import Sight
from mmsdk.apps.beforehand import check_drawn
from mmsdk.apps.explain import GAP, LINE, SIDE, draw, save
from mmsdk.errors import InputError
from mmsdk.tokencomp.types import Audit
from mmsdk.vision.types import Image, Video


def sight(grid: tuple[int, int, int], assignment: torch.Tensor, saliency: torch.Tensor | None = None) -> Sight:
    positions = torch.cartesian_prod(*[torch.arange(side) for side in grid]).reshape(-1, 3)
    audit = Audit("test", assignment, torch.zeros(len(positions)))
    return Sight("picture.png", grid, positions, torch.empty(0) if saliency is None else saliency, audit)


def grey(height: int, width: int, level: int = 200) -> Image:
    return Image(torch.full((3, height, width), level, dtype=torch.uint8))


def panel(page: np.ndarray, number: int, height: int = SIDE, width: int = SIDE) -> np.ndarray:
    left = GAP + number * (width + GAP)
    return page[GAP : GAP + height, left : left + width]


def test_dropped_patches_are_dark_and_kept_ones_bright() -> None:
    assignment = torch.full((16,), -1)
    assignment[:4] = torch.arange(4)  # the top row of a 4 x 4 grid stays
    page = np.asarray(draw([grey(64, 64)], [sight((1, 4, 4), assignment)]))
    plain, looked = panel(page, 0), panel(page, 1)
    assert (plain == 200).all()
    quarter = SIDE // 4
    inside = slice(4, quarter - 4)
    assert (looked[inside, inside] == 200).all()
    assert (looked[quarter + 4 :, inside] == 50).all()


@pytest.mark.parametrize(("height", "width"), [(10, 3000), (3000, 10)])
def test_a_strip_is_drawn_thick_enough_to_be_seen(height: int, width: int) -> None:
    page = np.asarray(draw([grey(height, width, 90)], [sight((1, 4, 4), torch.arange(16))]))
    shown = panel(page, 0, *((24, SIDE) if width > height else (SIDE, 24)))
    assert min(shown.shape[:2]) == 24 and (shown == 90).all()


def test_important_patches_are_warm() -> None:
    saliency = torch.zeros(16)
    saliency[5] = 1.0
    page = np.asarray(draw([grey(64, 64)], [sight((1, 4, 4), torch.arange(16), saliency)])).astype(int)
    looked = panel(page, 1)
    warm, cold = looked[SIDE * 3 // 8, SIDE * 3 // 8], looked[SIDE - 5, SIDE - 5]
    assert warm[0] > warm[2] + 20 and abs(cold[0] - cold[2]) < 5


def test_merged_groups_are_outlined_and_a_full_grid_is_not() -> None:
    halves = torch.tensor([0, 0, 1, 1] * 4)
    merged = panel(np.asarray(draw([grey(64, 64)], [sight((1, 4, 4), halves)])), 1)
    assert (merged[:, SIDE // 2] == 0).all() and (merged[:, SIDE // 4] == 200).all(), "dark lines on a bright picture"
    dark = panel(np.asarray(draw([grey(64, 64, 40)], [sight((1, 4, 4), halves)])), 1)
    assert (dark[:, SIDE // 2] == 255).all() and (dark[:, SIDE // 4] == 40).all()
    full = panel(np.asarray(draw([grey(64, 64)], [sight((1, 4, 4), torch.arange(16))])), 1)
    assert (full == 200).all()


def test_clips_show_their_frames_in_order_and_shapes_are_kept() -> None:
    frames = torch.stack([torch.full((3, 40, 80), 20 * t, dtype=torch.uint8) for t in range(6)])
    clip = Video(frames, torch.arange(6).float())
    page = np.asarray(draw([clip], [sight((6, 2, 4), torch.arange(48))]))
    shown = [panel(page, t, SIDE // 4, SIDE // 2) for t in range(6)]
    assert [int(frame[20, 20, 0]) for frame in shown] == [0, 20, 40, 60, 80, 100]


def lines_of(page: PIL.Image.Image) -> list[str]:
    """The text above the first panel, line by line: a "question" is blue, an "answer" black, "" is empty."""
    pixels = np.asarray(page).astype(int)
    top = int(((pixels == 200).all(axis=2).sum(axis=1) >= 30).argmax())
    found = []
    for line in range((top - 2 * GAP) // LINE):
        band = pixels[GAP + line * LINE : GAP + (line + 1) * LINE]
        blue, black = (band[..., 2] - band[..., 0] > 60).any(), (band.max(axis=2) < 110).any()
        assert not (blue and black)
        found.append("question" if blue else "answer" if black else "")
    return found


def test_the_question_stands_above_the_answer_in_a_colour_of_its_own() -> None:
    bare = draw([grey(64, 64)], [sight((1, 4, 4), torch.arange(16))])
    page = draw([grey(64, 64)], [sight((1, 4, 4), torch.arange(16))], "What is on the table? " * 5, "A cup.\nAnd a spoon.")
    assert lines_of(page) == ["question", "question", "answer", "answer"]
    assert (page.width, page.height) == (bare.width, bare.height + 4 * LINE + GAP)


def test_long_words_and_long_names_stay_on_the_canvas() -> None:
    """Nothing is written into the margins, and a word that is longer than a line goes on in the next."""
    named = dataclasses.replace(sight((1, 16, 2), torch.arange(32)), source="W" * 80)
    page = draw([grey(64, 8)], [named], "W" * 90, "W" * 90)
    assert page.width == SIDE
    pixels = np.asarray(page)
    assert (pixels[:, :GAP] == 255).all() and (pixels[:, SIDE - GAP :] == 255).all() and (pixels[-GAP:] == 255).all()
    count = len(lines_of(page)) // 2
    assert lines_of(page) == ["question"] * count + ["answer"] * count and 3 <= count <= 9


def test_paths_are_checked_before_the_work(tmp_path: Path) -> None:
    check_drawn(tmp_path / "out.png")
    with pytest.raises(InputError, match=r"'\.unknown' names no format.*\.png"):
        check_drawn(tmp_path / "out.unknown")
    with pytest.raises(InputError, match="not there"):
        check_drawn(tmp_path / "no" / "out.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        check_drawn(tmp_path / "folder.png")
    (tmp_path / "photo.png").touch()
    check_drawn(tmp_path / "photo.png", [tmp_path / "other.png", "data:image/png;base64," + "A" * 9000])
    with pytest.raises(InputError, match=r"photo\.png.*asked about"):
        check_drawn(tmp_path / "photo.png", [str(tmp_path / "folder.png" / ".." / "photo.png")])


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_without_rights_is_told_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0o500)
    with pytest.raises(InputError, match="cannot be written"):
        check_drawn(tmp_path / "shut" / "out.png")


def test_a_picture_that_cannot_be_written_after_all_is_an_input_error(tmp_path: Path) -> None:
    page = draw([grey(64, 64)], [sight((1, 4, 4), torch.arange(16))], "caf\udcff 猫", "\udcff")
    save(page, tmp_path / "out.png")
    with pytest.raises(InputError, match="cannot be written there"):
        save(page, tmp_path / "gone" / "out.png")
    # WebP holds no side of more than 16,383 pixels
    with pytest.raises(InputError, match="10x20000 cannot be written there"):
        save(PIL.Image.new("RGB", (10, 20000)), tmp_path / "out.webp")
