"""Captions are judged by what they name: whole words, singular or plural, once each."""

import numpy as np
import pytest
import torch

from mmsdk.apps.train_mini.captions import phrases, recall, recall_of
from mmsdk.apps.train_mini.scenes import Scene, Thing
from mmsdk.models.mini.family import load_parts
from mmsdk.pipeline import Pipeline
from mmsdk.vision.types import Image
from mmsdk.weights.bundle import Bundle

DOG = Thing("dog", "", "object", 0.2, 0.2, 0.2, 0.2)
RED = Thing("circle", "red", "shape", 0.8, 0.8, 0.2, 0.2)
SIGN = Thing("TAXI", "black", "word", 0.5, 0.5, 0.3, 0.1)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("a dog at the top left and a red circle at the bottom right", 1.0),
        ("three dogs and a red square", 0.5),
        ("a hotdog and a circle", 0.0),
        ("the word TAXI", 0.0),
        ("", 0.0),
    ],
)
def test_recall_counts_whole_names(text: str, share: float) -> None:
    assert recall_of(text, ["dog", "red circle"]) == share


def test_a_thing_shown_twice_is_named_once() -> None:
    assert phrases(Scene(np.zeros((8, 8, 3), np.uint8), (DOG, RED, DOG, SIGN))) == ["dog", "red circle", "the word"]


def test_the_parts_of_the_robot_are_no_things_on_the_table() -> None:
    arm = Thing("robot arm", "grey", "object", 0.5, 0.5, 0.2, 0.2)
    cup = Thing("mug", "red", "object", 0.3, 0.6, 0.2, 0.2)
    assert phrases(Scene(np.zeros((8, 8, 3), np.uint8), (arm, cup), suite="robot")) == ["mug"]


@pytest.fixture(scope="module")
def pipe(mini_bundle: Bundle) -> Pipeline:
    return Pipeline(load_parts(mini_bundle, torch.float32, torch.device("cpu")))


def test_recall_asks_the_pipeline_itself(pipe: Pipeline) -> None:
    shown = Image(torch.full((3, 64, 64), 200, dtype=torch.uint8))
    scenes = [Scene(np.zeros((0, 0, 3), np.uint8), (thing,)) for thing in (DOG, RED)]
    said = [str(pipe(media, "Describe the picture.", max_tokens=80)) for media in (shown, ())]
    expected = (recall_of(said[0], ["dog"]) + recall_of(said[1], ["red circle"])) / 2
    assert recall(pipe, scenes, [shown, None]) == pytest.approx(expected)
