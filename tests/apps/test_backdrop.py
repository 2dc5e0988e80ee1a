"""A scene's tokens before another picture's background."""

import numpy as np
import pytest
import torch

from mmsdk.apps.train_mini.backdrop import before, on_a_photo
from mmsdk.apps.train_mini.features import Sample, Shard
from mmsdk.apps.train_mini.scenes import Scene, Thing
from mmsdk.vision.types import VisualTokens

GRID = (1, 8, 8)
NO_PIXELS = np.zeros((0, 0, 3), np.uint8)


def scene(*middles: tuple[float, float], **more: str) -> Sample:
    return Sample(Scene(NO_PIXELS, tuple(Thing("dog", "", "object", x, y, 0.2, 0.2) for x, y in middles), **more), None)


def shard_of(sample: Sample, features: torch.Tensor) -> Shard:
    return Shard((sample,), features[None].half(), torch.tensor([64]), torch.tensor([GRID]))


def tokens(features: torch.Tensor, index: torch.Tensor | None = None) -> VisualTokens:
    return shard_of(scene(), features).tokens(0, index)


def test_only_the_background_is_blended_and_only_with_background() -> None:
    own, other = scene((0.19, 0.19)), scene((0.81, 0.81))
    theirs = torch.full((8, 8, 3), 9.0)
    theirs[:5] = 1.0  # 9 stands for the other dog and what is around it
    donor = shard_of(other, theirs.reshape(64, 3))
    shares = set()
    for seed in range(40):
        mixed = before(donor, 0, tokens(torch.zeros(64, 3)), torch.arange(64), own, np.random.default_rng(seed)).view(8, 8, 3)
        assert (mixed[:3, :3] == 0).all(), "the dog and its neighbours"
        background = torch.cat((mixed[4:].flatten(), mixed[:4, 4:].flatten()))
        assert (background > 0.39).all()
        shares.add(round(float(background.min()), 3))
    assert len(shares) > 5 and max(shares) == 1.0, "blends, and wholly another background"


def test_cells_keep_their_order_in_a_part_of_the_picture() -> None:
    index = torch.tensor([0, 9, 40, 63])
    own = scene((0.19, 0.19))
    donor = shard_of(scene(), torch.ones(64, 3))
    mixed = before(donor, 0, tokens(torch.zeros(64, 3), index), index, own, np.random.default_rng(0))
    assert (mixed[1] == 0).all() and (mixed[2:] > 0).all()


def test_a_picture_without_background_lends_none() -> None:
    crowd = scene(*((x / 8 + 0.06, y / 8 + 0.06) for x in range(8) for y in range(8)))
    own = tokens(torch.randn(64, 3))
    donor = shard_of(crowd, torch.ones(64, 3))
    assert before(donor, 0, own, torch.arange(64), scene((0.2, 0.2)), np.random.default_rng(0)) is own.features


@pytest.mark.parametrize(("sample", "expected"), [(scene(), True), (scene(background="red"), False), (scene(suite="robot"), False)])
def test_backgrounds_that_are_asked_about_stay(sample: Sample, expected: bool) -> None:
    assert on_a_photo(sample) == expected
