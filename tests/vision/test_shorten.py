"""Encoders whose transformer is shortened: exact counts, everyone accounted for, frames by themselves, and who carries what to the end."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmsdk.errors import BudgetError, InputError
from mmsdk.tokencomp.methods.tome import ToMe
from mmsdk.vision.encode import Backbone, Encoder
from mmsdk.vision.encoders.clip import Clip
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.encoders.siglip import Siglip
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.shorten import Groups, Shortened, Shortener, ShorteningEncoder, Whole
from mmsdk.vision.types import Image, Media, Video
from mmsdk.vision.vit import ViT, ViTConfig

FIT = Preprocess(area=36)


def small(**changes: object) -> ViT:
    torch.manual_seed(0)
    return ViT(replace(ViTConfig(width=48, layers=3, heads=3, hidden=96, grid=4), **changes)).eval()


MAKERS: dict[str, Callable[[], Backbone]] = {
    "dinov2": lambda: Dinov2(small(), middle=(0, 1)),
    "clip": lambda: Clip(small(norm_first=True, layer_scale=False, patch_bias=False, activation="quick_gelu")),
    "siglip": lambda: Siglip(small(class_token=False, layer_scale=False, activation="gelu_tanh")),
}


@pytest.fixture(params=sorted(MAKERS))
def encoder(request: pytest.FixtureRequest) -> Encoder:
    return Encoder(MAKERS[request.param](), FIT, batch=3)


def picture(height: int, width: int, seed: int = 0) -> Image:
    generator = torch.Generator().manual_seed(seed)
    return Image(torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator), f"{height}x{width}")


def clip(frames: int, height: int, width: int, seed: int = 0) -> Video:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (frames, 3, height, width), dtype=torch.uint8, generator=generator)
    return Video(pixels, torch.arange(frames) * 0.25, f"{frames} frames")


def run(encoder: Encoder, media: list[Media], counts: list[int], by: Shortener = ToMe()) -> list[Shortened]:
    frames = [len(item.frames) if isinstance(item, Video) else 1 for item in media]
    plans = [encoder.plan(item.size, f, by, count) for item, f, count in zip(media, frames, counts, strict=True)]
    return encoder.shortened(media, plans)


def test_counts_weights_places_and_owners_agree(encoder: Encoder) -> None:
    assert isinstance(encoder, ShorteningEncoder)
    media: list[Media] = [picture(84, 84), clip(3, 70, 98, 1), picture(20, 200, 2), clip(2, 84, 84, 3), picture(84, 84, 4)]
    counts = [9, 16, 5, 10, 20]
    for item, count, result in zip(media, counts, run(encoder, media, counts), strict=True):
        tokens, owner = result.tokens, result.owner
        frames = len(item.frames) if isinstance(item, Video) else 1
        assert tokens.grid == (frames, *FIT.grid(item.size)) and len(tokens.times) == frames
        n = frames * tokens.grid[1] * tokens.grid[2]
        assert len(tokens) == len(tokens.saliency) == count and tokens.features.shape == (count, encoder.width)
        assert tokens.features.isfinite().all() and tokens.keys is not None and tokens.keys.shape == (count, 48)
        assert owner.shape == (n,) and torch.equal(torch.bincount(owner).float(), tokens.weight)
        assert result.positions.tolist() == [[t, y, x] for t in range(frames) for y in range(tokens.grid[1]) for x in range(tokens.grid[2])]
        t, y, x = tokens.positions.unbind(1)
        assert ((t * tokens.grid[1] + y) * tokens.grid[2] + x).diff().min() >= 0
        for token in range(count):
            mine = result.positions[owner == token]
            assert set(mine[:, 0].tolist()) == {int(t[token])}, "a token is of one frame"
            assert tokens.positions[token].tolist() == (mine.float().mean(0) + 0.5).floor().tolist()
        assert abs(float(tokens.saliency.min())) > 0


def test_a_batch_equals_inputs_alone(encoder: Encoder) -> None:
    media: list[Media] = [picture(84, 84), picture(84, 84, 1), clip(3, 84, 84, 2), picture(30, 90, 3)]
    counts = [9, 9, 18, 6]
    for item, count, result in zip(media, counts, run(encoder, media, counts), strict=True):
        (alone,) = run(encoder, [item], [count])
        assert torch.equal(alone.owner, result.owner) and torch.equal(alone.tokens.positions, result.tokens.positions)
        torch.testing.assert_close(alone.tokens.features, result.tokens.features, rtol=1e-4, atol=1e-4)


def test_frames_of_a_clip_are_merged_as_pictures_are(encoder: Encoder) -> None:
    moving = clip(3, 84, 84)
    (together,) = run(encoder, [moving], [20])
    start = 0
    for frame, count in enumerate([6, 7, 7]):
        (alone,) = run(encoder, [Image(moving.frames[frame])], [count])
        torch.testing.assert_close(together.tokens.features[start : start + count], alone.tokens.features, rtol=1e-4, atol=1e-4)
        start += count


def test_whole_shortens_nothing(encoder: Encoder) -> None:
    (plain,) = encoder([picture(84, 84)])
    (whole,) = run(encoder, [picture(84, 84)], [36], Whole())
    assert torch.equal(plain.features, whole.tokens.features) and torch.equal(whole.owner, torch.arange(36))
    assert torch.equal(plain.saliency, whole.tokens.saliency) and torch.equal(plain.positions, whole.tokens.positions)


def test_budgets_that_leave_a_frame_nothing_or_go_too_far_are_refused(encoder: Encoder) -> None:
    with pytest.raises(BudgetError, match="each of 5 frames"):
        encoder.plan((84, 84), 5, ToMe(), 4)
    with pytest.raises(BudgetError, match="36 tokens cannot become 4"):
        encoder.plan((84, 84), 1, ToMe(), 4)
    assert encoder.plan((84, 84), 1, ToMe(), 5)[0].counts[-1] == 5


def test_an_input_without_pixels_is_named(encoder: Encoder) -> None:
    void = Image(torch.zeros(3, 0, 5, dtype=torch.uint8), "void")
    with pytest.raises(InputError, match=r"item 2 \(index 1, void\)"):
        encoder.shortened([picture(84, 84), void], [encoder.plan((84, 84), 1, ToMe(), 9)] * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_half(dtype: torch.dtype) -> None:
    halved = Encoder(Dinov2(small().to(dtype), middle=(0,)), FIT)
    (result,) = run(halved, [picture(84, 84)], [12])
    assert result.tokens.features.dtype == dtype and result.tokens.saliency.dtype == result.tokens.weight.dtype == torch.float32
    assert result.tokens.features.isfinite().all() and result.tokens.weight.sum() == 36


@pytest.mark.parametrize("first", [0, 1])
def test_values_are_carried_as_means_over_patches(first: int) -> None:
    """Through two merges at once and step by step: the mean over the patches of a token of what each patch's token had."""
    generator = torch.Generator().manual_seed(0)
    n, b = 10, 3
    start = Groups.of(torch.zeros(b, first + n, 4), first)
    middle = start.joined(surjection(b, first, n, 6, generator), 6)
    final = middle.joined(surjection(b, first, 6, 3, generator), 3)
    for groups in (start, middle, final):
        assert torch.equal(groups.size[:, first:].sum(1), torch.full((b,), float(n))) and torch.equal(
            groups.size[:, :first], torch.ones(b, first)
        )
        values = torch.randn(b, groups.size.shape[1], 5, generator=generator)
        carried = groups.carry(values, final)
        assert torch.equal(carried[:, :first], values[:, :first])
        for row in range(b):
            for token in range(first, first + 3):
                patches = (final.owner[row] == token).nonzero()[:, 0]
                torch.testing.assert_close(carried[row, token], values[row, groups.owner[row, patches]].mean(0))
    same = torch.randn(b, first + n, 2)
    assert start.carry(same, start) is same


def surjection(b: int, first: int, n: int, m: int, generator: torch.Generator) -> Tensor:
    rows = [
        torch.cat((torch.arange(m), torch.randint(0, m, (n - m,), generator=generator)))[torch.randperm(n, generator=generator)]
        for _ in range(b)
    ]
    return torch.cat((torch.arange(first).expand(b, -1), first + torch.stack(rows)), dim=1)
