"""How values are shown: of what holds pixels and numbers its shapes, of what a system says no file twice."""

import errno
from dataclasses import dataclass

import numpy as np
import PIL.Image
import pytest
import torch
from torch import nn

from mmsdk.answer import Sight
from mmsdk.encoded import Encoded
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.prompt import Prompt
from mmsdk.tokencomp.plan import untouched
from mmsdk.vision.intake import Frames
from mmsdk.vision.types import Image, Video
from mmsdk.vision.values import brief, cause
from mmsdk.vla.types import ActionChunk, Observation, Request, Stamp

PICTURE = Image(torch.zeros(3, 300, 400, dtype=torch.uint8), "photo.jpg")


def test_what_holds_pixels_is_told_by_shapes(small: Mini) -> None:
    assert repr(PICTURE) == "Image(pixels=uint8[3, 300, 400], source='photo.jpg', notes=())"
    clip = Video(PICTURE.pixels.expand(9, -1, -1, -1), torch.arange(9.0))
    assert repr(clip).startswith("Video(frames=uint8[9, 3, 300, 400], times=float32[9]")
    (tokens,) = small.encoder([PICTURE])
    stamp = Stamp(0.0)
    seen = Observation({"front": PICTURE}, torch.zeros(7), "Pick it up.", stamp)
    told: list[object] = [
        clip,
        tokens,
        untouched(tokens),
        Encoded.of(PICTURE, tokens, "small"),
        Prompt.of([PICTURE] * 9, "Which?"),
        Sight("photo.jpg", tokens.grid, tokens.positions, tokens.saliency, untouched(tokens).audit),
        Frames([np.zeros((40, 40, 3), np.uint8)] * 30, fps=2.0),
        Frames([PIL.Image.new("RGB", (40, 40))] * 30),
        small,
        Pipeline(small),
        seen,
        Request(seen, torch.zeros(0, 7)),
        ActionChunk(torch.zeros(16, 7), stamp),
    ]
    for one in told:
        assert len(repr(one)) < 900 and "tensor(" not in repr(one) and "array(" not in repr(one), repr(one)
    assert repr(told[4]).count("Image(") == 4 and "... 10 in all" in repr(told[4])


@dataclass(frozen=True)
class Holding:
    """Something of everything."""

    words: str
    parts: dict[str, torch.Tensor]
    layer: nn.Module
    few: tuple[int, ...] = (1,)


def test_the_parts_of_a_value_are_told_one_by_one() -> None:
    value = Holding("w" * 500, {name: torch.zeros(2) for name in "abcdef"}, nn.Linear(2, 2))
    assert brief(value) == f"Holding(words='{'w' * 56}..., parts={{{', '.join(f'{name!r}: float32[2]' for name in 'abcd')}, ...}}, " + (
        "layer=Linear, few=(1,))"
    )


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "nofile.json"), "No such file or directory"),
        (OSError("odd"), "odd"),
        (ValueError("no JSON"), "no JSON"),
    ],
)
def test_a_cause_names_no_file(error: Exception, told: str) -> None:
    assert cause(error) == told
