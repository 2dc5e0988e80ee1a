"""The grid keeps the aspect, never exceeds its area, and the resize is what Pillow's antialiased bicubic gives."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmsdk.vision.preprocess import Preprocess

SIDES = st.integers(1, 5000)


@given(SIDES, SIDES, st.sampled_from([1, 16, 64, 256, 1024]))
def test_grid_fits_the_area_and_has_a_patch_per_side(height: int, width: int, area: int) -> None:
    rows, columns = Preprocess(area=area).grid((height, width))
    assert rows >= 1
    assert columns >= 1
    assert rows * columns <= area


@given(st.integers(100, 2000), st.integers(100, 2000))
def test_grid_keeps_the_aspect(height: int, width: int) -> None:
    rows, columns = Preprocess().grid((height, width))
    if 1 / 4 < height / width < 4:
        assert rows / columns == pytest.approx(height / width, rel=0.2)
        assert rows * columns >= 180


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((224, 224), (16, 16)),
        ((196, 252), (14, 18)),
        ((168, 294), (12, 21)),
        ((480, 640), (14, 18)),
        ((1, 5000), (1, 256)),
        ((5000, 1), (256, 1)),
    ],
)
def test_grid_of_usual_and_extreme_sizes(size: tuple[int, int], grid: tuple[int, int]) -> None:
    assert Preprocess().grid(size) == grid


def test_resize_is_pillows_bicubic(photos: Path) -> None:
    picture = Image.open(photos / "coffee.png").convert("RGB").crop((100, 50, 511, 347))
    fit = Preprocess(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    rows, columns = fit.grid((picture.height, picture.width))
    expected = torch.from_numpy(np.asarray(picture.resize((columns * 14, rows * 14), Image.Resampling.BICUBIC)).copy())
    pixels = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1)
    # Pillow rounds to whole values after each of its two passes
    assert (fit(pixels[None])[0].permute(1, 2, 0) * 255 - expected).abs().max() < 2.5


def test_exact_size_is_not_resampled() -> None:
    pixels = torch.randint(0, 256, (1, 3, 224, 224), dtype=torch.uint8)
    fit = Preprocess(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    assert torch.equal((fit(pixels) * 255).round().to(torch.uint8), pixels)


@pytest.mark.parametrize("patch", [14, 28])
def test_in_08_images_smaller_than_a_patch_have_a_patch_per_side(patch: int) -> None:
    for size in ((1, 1), (1, 40), (13, 13), (26, 28), (332, 27), (2, 1)):
        rows, columns = Preprocess(patch=patch).grid(size)
        assert rows >= 1 and columns >= 1 and rows * columns <= 256
        fitted = Preprocess(patch=patch)(torch.full((3, *size), 128, dtype=torch.uint8))
        assert fitted.shape == (3, rows * patch, columns * patch)
        assert fitted.isfinite().all() and (fitted.amax((1, 2)) - fitted.amin((1, 2))).max() < 1e-4


def test_one_picture_and_a_clip_of_it_are_the_same() -> None:
    frames = torch.randint(0, 256, (2, 3, 3, 40, 61), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    fit = Preprocess(area=16)
    assert torch.equal(fit(frames)[1, 2], fit(frames[1, 2]))
