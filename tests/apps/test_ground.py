"""Grounding: labelled patches are those of the things drawn, and teach the projector words it can be asked for."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from mmsdk.apps.train_mini import vocabulary as words
from mmsdk.apps.train_mini.clips import Clip
from mmsdk.apps.train_mini.features import encoded
from mmsdk.apps.train_mini.ground import Patches, WordTable, gather, ground, joined, probe
from mmsdk.apps.train_mini.scenes import Scene, Thing
from mmsdk.models.mini.projector import Projector, ProjectorConfig
from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.vit import ViT, ViTConfig


class Letters:
    """One token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 97 for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def table() -> WordTable:
    return WordTable.of(torch.randn(97, 64, generator=torch.Generator().manual_seed(0)), Letters())


@pytest.fixture(scope="module")
def eyes() -> Encoder:
    torch.manual_seed(4)
    vit = ViT(ViTConfig(width=32, layers=2, heads=2, hidden=64, grid=4)).eval().requires_grad_(False)
    return Encoder(Dinov2(vit), Preprocess(area=16))


def scenes() -> Iterator[Scene | Clip]:
    """A dog at the top left of one picture, a red circle at the bottom right of another."""
    pixels = np.random.default_rng(0).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    yield Scene(pixels, (Thing("dog", "", "object", 0.25, 0.25, 0.5, 0.5),))
    yield Scene(255 - pixels, (Thing("circle", "red", "shape", 0.875, 0.875, 0.2, 0.2),))


def test_patches_are_labelled_by_what_is_there(eyes: Encoder, table: WordTable) -> None:
    found = gather(encoded(scenes(), 2, eyes), table)
    names, colours = table.vocabulary["name"], table.vocabulary["colour"]
    # a grid of 4 x 4 patches: the dog covers the four at the top left, the circle the last one
    assert found.labels[:16, 0].tolist() == [names["dog" if r < 2 and c < 2 else "background"] for r in range(4) for c in range(4)]
    assert found.labels[16:, 0].tolist() == [names["background"]] * 15 + [names["circle"]]
    assert found.labels[31, 1] == colours["red"] and set(found.labels[:31, 1].tolist()) == {-1}
    assert found.labels[[0, 15], 2].tolist() == [words.PLACES.index("top left"), words.PLACES.index("bottom right")]
    assert set(found.labels[:, 3].tolist()) == {-1}


def test_a_plain_background_has_a_colour_and_of_a_robot_scene_only_what_lies_on_the_table_is_named(eyes: Encoder, table: WordTable) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    arm, mug = Thing("robot arm", "red", "object", 0.3, 0.3, 0.2, 0.2), Thing("mug", "white", "object", 0.875, 0.875, 0.2, 0.2)
    items = [Scene(pixels, (Thing("circle", "red", "shape", 0.875, 0.875, 0.2, 0.2),), "grey"), Scene(pixels, (arm, mug), suite="robot")]
    found = gather(encoded(iter(items), 2, eyes), table)
    names, colours = table.vocabulary["name"], table.vocabulary["colour"]
    assert found.labels[:16, 1].tolist() == [colours["grey"]] * 15 + [colours["red"]]
    robot = found.labels[16:]
    assert robot[-1, :2].tolist() == [names["mug"], colours["white"]] and len(robot) < 16, "what shows the arm is no background"
    assert set(robot[:-1, 0].tolist()) == {names["background"]} and set(robot[:-1, 1].tolist()) == {-1}


def test_grounding_teaches_words(table: WordTable) -> None:
    torch.manual_seed(0)
    labels = torch.stack([torch.randint(8, (400,)), torch.randint(4, (400,)), torch.randint(9, (400,)), torch.full((400,), -1)], dim=1)
    seen = torch.cat([torch.nn.functional.one_hot(labels[:, i], 12).float() for i in range(3)], dim=1)
    patches = Patches(seen.half(), torch.zeros(400, Projector.places), labels)
    projector = Projector(ProjectorConfig(36, 64, 64))
    before = probe(projector, patches, table)
    ground(projector, joined([patches, patches]), table, steps=400, batch=128)
    after = probe(projector, patches, table)
    assert set(after) == {"name", "colour", "place"} and max(before.values()) < 0.5 < 0.8 < min(after.values())
