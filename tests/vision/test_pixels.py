"""Pictures of any shape: prepared as transformers prepares them, and refused before memory is taken where they would grow without bound."""

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from mmsdk.errors import InputError
from mmsdk.vision.anyres import Canvas
from mmsdk.vision.pixels import Levels, check_resized, resized, squared
from mmsdk.vision.prepare import Prepare
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.shuffled import Canvas as Tiles
from mmsdk.vision.shuffled import Splitting
from mmsdk.vision.smart_resize import SmartResize

SHORT = Prepare(14, (56, 56), 56)
PLAIN = Levels()
FAMILIES: dict[str, Callable[[Tensor], object]] = {
    "llava": lambda frames: SHORT(frames),
    "paligemma, gemma3": lambda frames: Prepare(14, (448, 448))(frames),
    "llava padded": lambda frames: Prepare(14, (56, 56), square=True)(frames),
    "llava_next": lambda frames: Canvas(448, 32, ((448, 448), (896, 448)), "bicubic", PLAIN).cut(frames[0]),
    "internvl": lambda frames: Tiles((448, 448), 1, 12, "bicubic", PLAIN).cut(frames[0]),
    "internvl clips": lambda frames: Tiles((448, 448), 1, 12, "bicubic", PLAIN).whole(frames),
    "qwen": lambda frames: SmartResize(56 * 56, 28 * 28 * 1280).grid((frames.shape[-2], frames.shape[-1])),
    "mini": lambda frames: Preprocess(area=4)(frames.expand(-1, -1, -1, 20)),
}


def picture(height: int, width: int, frames: int = 1) -> Tensor:
    return torch.randint(0, 256, (frames, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(height))


@pytest.mark.parametrize("size", [(70, 100), (100, 70), (56, 56), (30, 31), (3, 600), (600, 3), (1, 200), (200, 1)], ids=str)
def test_the_middle_of_ordinary_and_long_pictures_is_that_of_transformers(size: tuple[int, int]) -> None:
    frames = picture(*size, frames=2)
    processor = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}, do_normalize=False)
    arrays = [np.ascontiguousarray(frame.permute(1, 2, 0).numpy()) for frame in frames]
    wanted = torch.from_numpy(np.stack(processor(images=arrays, input_data_format="channels_last")["pixel_values"]))
    assert torch.allclose(SHORT(frames), wanted.float(), atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_picture_that_would_grow_without_bound_is_refused_before_memory_is_taken(name: str) -> None:
    """A hundred million rows of one pixel, which are 300 MB, copied once at most; what Pillow makes on the way would be 100 GB."""
    frames = torch.zeros(1, 3, 1, 1, dtype=torch.uint8).expand(1, 3, 100_000_000, 1)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=r"1x100000000|20x100000000|too narrow for a canvas of"):
            FAMILIES[name](frames)
        assert tracemalloc.get_traced_memory()[1] < 10**9
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [(1, 30_000), (30_000, 1)])
def test_what_is_cut_from_the_middle_may_be_no_longer_than_qwen_has_it(size: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=f"is {size[1]}x{size[0]}; one side may be at most 200 times the other"):
        SHORT(picture(*size))
    with pytest.raises(InputError, match=f"is {size[1]}x{size[0]}; one side may be at most 200 times the other"):
        SmartResize(56 * 56, 28 * 28 * 1280).grid(size)


def test_long_pictures_stay_small_where_they_are_brought_to_one_size() -> None:
    splitting = Splitting(56, 224, 112, True, "lanczos", PLAIN)
    for size in ((1, 30_000), (30_000, 1)):
        assert splitting.cut(picture(*size)[0]).shape[1:] == (3, 56, 56)
        assert Prepare(14, (56, 56))(picture(*size)).shape == (1, 3, 56, 56)
        assert splitting.whole(picture(*size, frames=2)).shape == (2, 3, 56, 56)


def test_sizes_are_told_with_the_width_first_and_checked_both_there_and_on_the_way() -> None:
    check_resized((20_000, 5_000), (4_096, 4_096))
    with pytest.raises(InputError, match="is 1x1000000, and 336,000,000 pixels on the way to 336x336, but at most 268,435,456"):
        check_resized((1_000_000, 1), (336, 336))
    with pytest.raises(InputError, match="is 20000x4, and 400,000,000 pixels on the way to 20000x20000"):
        squared(picture(4, 20_000), (0, 0, 0))
    small = picture(4, 20_000)
    assert resized(small, (4, 20_000), "bicubic") is small
