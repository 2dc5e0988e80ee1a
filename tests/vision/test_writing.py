"""Pages and screens are told from photographs, patterns and noise."""

from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont
import pytest
import torch
from jaxtyping import UInt8
from torch import Tensor

from mmsdk.vision.intake import load_image
from mmsdk.vision.writing import writing

WORDS = "the quick brown fox jumps over a lazy dog and then reads its small print with great care ".split()


def page(letter: int, width: int, height: int, ink: str = "black", paper: str = "white", turned: float = 0.0) -> UInt8[Tensor, "3 h w"]:
    """Lines of words in letters of this size, over the whole picture."""
    picture = PIL.Image.new("RGB", (width, height), paper)
    pen, font = PIL.ImageDraw.Draw(picture), PIL.ImageFont.load_default(size=letter)
    draw = np.random.default_rng(letter)
    for top in range(letter, height - 2 * letter, round(1.4 * letter)):
        line = ""
        while pen.textlength(line, font=font) < width - 7 * letter:
            line += str(draw.choice(WORDS)) + " "
        pen.text((letter, top), line, font=font, fill=ink)
    return pixels(picture.rotate(turned, fillcolor=paper))


def pixels(picture: PIL.Image.Image) -> UInt8[Tensor, "3 h w"]:
    return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)


@pytest.mark.parametrize(
    ("letter", "width", "height", "ink", "paper"),
    [
        (9, 224, 224, "black", "white"),
        (12, 600, 800, "black", "white"),
        (16, 800, 1000, "#333333", "#eeeeee"),
        (14, 512, 512, "white", "#222244"),
        (32, 1240, 1754, "black", "white"),
    ],
)
def test_a_page_is_dense_whatever_its_letters_and_colours(letter: int, width: int, height: int, ink: str, paper: str) -> None:
    found = writing(page(letter, width, height, ink, paper))
    assert found.dense and found.share > 0.4


@pytest.mark.parametrize("turned", [-2.0, 1.0, 2.0])
def test_a_page_that_lies_a_little_askew_is_dense_too(turned: float) -> None:
    assert writing(page(14, 600, 600, turned=turned)).dense


def test_a_photographed_page_is_dense_and_photographs_are_not(photos: Path) -> None:
    dense = {path.name for path in sorted(photos.rglob("*")) if path.is_file() and writing(load_image(path).pixels).dense}
    assert dense == {"page.png"}


def test_a_sign_is_writing_but_not_what_the_picture_is_about() -> None:
    picture = PIL.Image.new("RGB", (640, 480), "#88aacc")
    PIL.ImageDraw.Draw(picture).text((200, 200), "Main street", font=PIL.ImageFont.load_default(size=40), fill="white")
    found = writing(pixels(picture))
    assert found.pieces > 0 and not found.dense


@pytest.mark.parametrize("size", [(1, 1), (3, 700), (56, 56), (224, 224)], ids=str)
def test_noise_is_no_writing(size: tuple[int, int]) -> None:
    noise = torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert not writing(noise).dense and not writing(torch.full((3, *size), 200, dtype=torch.uint8)).dense


@pytest.mark.parametrize("period", [6, 12])
def test_stripes_and_boards_are_no_writing(period: int) -> None:
    rows, columns = torch.meshgrid(torch.arange(400) // period % 2, torch.arange(400) // period % 2, indexing="ij")
    for pattern in (rows, columns, rows ^ columns):
        assert not writing((255 * pattern).to(torch.uint8).expand(3, -1, -1)).dense
