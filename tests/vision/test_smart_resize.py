"""Sizes by transformers' own rules, over many sizes of pictures and lengths of clips."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as smart_resize_together

from mmsdk.errors import InputError
from mmsdk.vision.smart_resize import SmartResize

SIDES = st.integers(1, 3000)
PICTURE = SmartResize(56 * 56, 28 * 28 * 1280)
CLIP = SmartResize(128 * 32 * 32, 32 * 32 * 768, patch=16, together=True)


@given(height=SIDES, width=SIDES)
def test_pb_01_pictures_have_the_sizes_of_transformers(height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(InputError, match="at most 200 times"):
            PICTURE.grid((height, width))
        return
    tall, wide = smart_resize(height, width, 28, PICTURE.least, PICTURE.most)
    assert PICTURE.grid((height, width)) == (tall // 14, wide // 14)


@pytest.mark.parametrize(("size", "expected"), [((14 * 15, 14 * 17), (2 * 8, 2 * 8)), ((14 * 13, 14 * 19), (2 * 6, 2 * 10))])
def test_pb_01_sides_amid_two_multiples_go_to_the_even_one(size: tuple[int, int], expected: tuple[int, int]) -> None:
    """As Python rounds: 7.5 and 8.5 become 8, 6.5 becomes 6, 9.5 becomes 10."""
    assert PICTURE.grid(size) == expected


@given(height=st.integers(8, 3000), width=st.integers(8, 3000), frames=st.integers(2, 60))
def test_clips_whose_frames_share_a_limit_have_the_sizes_of_transformers(height: int, width: int, frames: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    tall, wide = smart_resize_together(frames, height, width, 2, 32, CLIP.least, CLIP.most)
    assert CLIP.grid((height, width), frames) == (tall // 16, wide // 16)


def test_a_cap_bounds_each_frame_of_a_clip() -> None:
    """With the published caps: 768 tokens a frame, or the frames' share of 90 % of a context."""
    together = SmartResize(4 * 32 * 32, 10_000 * 32 * 32, patch=16, together=True, tokens=768)
    rows, columns = together.grid((2000, 2000), 4)
    assert 768 * 0.9 < rows * columns / 4 <= 768
    each = SmartResize(4 * 28 * 28, 10_000 * 28 * 28, tokens=1000)
    rows, columns = each.grid((2000, 2000), 20)
    assert 80 < rows * columns / 4 <= 1000 * 0.9 * 2 / 20


def test_pixels_keep_their_order_and_scale() -> None:
    pixels = torch.arange(3 * 28 * 56, dtype=torch.uint8).view(1, 3, 28, 56)
    assert torch.allclose(PICTURE(pixels, (2, 4)), pixels / 255)
