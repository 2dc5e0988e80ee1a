"""The contract of every vision encoder, on small random models of each family; one test per promise, over all of them."""

import dataclasses
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mmsdk import plugins
from mmsdk.errors import InputError, ModelError
from mmsdk.vision.encode import Backbone, Encoder, Fit, Sight
from mmsdk.vision.encoders.clip import Clip
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.encoders.siglip import Siglip
from mmsdk.vision.encoders.states import States
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.shorten import WHOLE, Shortening
from mmsdk.vision.types import Image, Media, Video, VisionEncoder
from mmsdk.vision.vit import ViT, ViTConfig
from mmsdk.vision.weights import vit_from_onnx

AREA = 36
SIZES = [(1, 1), (1, 40), (13, 13), (26, 28), (332, 27), (2, 1), (4000, 1), (84, 84), (70, 98), (300, 200)]


def small(**changes: object) -> ViT:
    torch.manual_seed(0)
    return ViT(dataclasses.replace(ViTConfig(width=48, layers=3, heads=3, hidden=96, grid=4), **changes)).eval()


FIT = Preprocess(area=AREA)
MAKERS: dict[str, Callable[[], Backbone]] = {
    "dinov2": lambda: Dinov2(small(), middle=(0,)),
    "clip": lambda: Clip(small(norm_first=True, layer_scale=False, patch_bias=False, activation="quick_gelu")),
    "siglip": lambda: Siglip(small(class_token=False, layer_scale=False, activation="gelu_tanh")),
    "states": lambda: States(small(norm_first=True, layer_scale=False, patch_bias=False, activation="quick_gelu"), (-1,)),
}
OF_ITS_OWN = {"qwen_vl": "models/test_qwen_vl.py"}
"""Encoders with sizes and steps of their own, and where they are tested."""


@pytest.fixture(params=sorted(MAKERS))
def encoder(request: pytest.FixtureRequest) -> VisionEncoder:
    return Encoder(MAKERS[request.param](), FIT, batch=3)


def picture(height: int, width: int, seed: int = 0) -> Image:
    generator = torch.Generator().manual_seed(seed)
    return Image(torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator), f"{height}x{width}")


def clip(frames: int, height: int, width: int, seed: int = 0) -> Video:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (frames, 3, height, width), dtype=torch.uint8, generator=generator)
    return Video(pixels, torch.arange(frames) * 0.25, f"{frames} frames")


def test_every_encoder_of_the_package_is_held_to_the_contract() -> None:
    assert plugins.available("mmsdk.vision.encoders") == sorted([*MAKERS, *OF_ITS_OWN])
    assert all((Path(__file__).parents[1] / file).is_file() for file in OF_ITS_OWN.values())


def test_it_is_a_vision_encoder(encoder: VisionEncoder) -> None:
    assert isinstance(encoder, VisionEncoder)
    (tokens,) = encoder([picture(84, 84)])
    assert tokens.features.shape == (36, encoder.width)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_counts_and_places_hold_for_every_size(encoder: VisionEncoder, size: tuple[int, int]) -> None:
    """IN-08, IN-09: smaller than a patch, one pixel, extreme aspects; as pictures, as clips, as clips of one frame."""
    inputs: list[Media] = [picture(*size), clip(1, *size), clip(3, *size)]
    for item, tokens in zip(inputs, encoder(inputs), strict=True):
        frames = len(item.frames) if isinstance(item, Video) else 1
        t, h, w = tokens.grid
        assert len(tokens) == encoder.count(size, frames) == t * h * w >= frames
        assert t == frames and t * h * w <= frames * AREA
        assert tokens.features.shape == (len(tokens), encoder.width) and tokens.features.isfinite().all()
        places = torch.stack([a.flatten() for a in torch.meshgrid(*map(torch.arange, tokens.grid), indexing="ij")], dim=1)
        assert torch.equal(tokens.positions, places)
        assert len(tokens.times) == t and len(tokens.weight) == len(tokens.saliency) == len(tokens)
        gh, gw = FIT.grid(size)
        assert tokens.weight.sum() == frames * gh * gw and tokens.weight.min() >= 1
        assert tokens.saliency.min() > 0 and tokens.saliency.dtype == torch.float32
        assert tokens.keys is not None and tokens.keys.shape == (len(tokens), 48)


def test_order_and_company_do_not_matter(encoder: VisionEncoder) -> None:
    """IN-09: sizes that alternate come back in order, each as if it had been alone."""
    inputs: list[Media] = [
        picture(84, 84, 1),
        picture(2, 1, 2),
        clip(4, 84, 84, 3),
        picture(70, 98, 4),
        clip(2, 2, 1, 5),
        picture(84, 84, 6),
    ]
    together = encoder(inputs)
    for item, tokens in zip(inputs, together, strict=True):
        (alone,) = encoder([item])
        assert alone.grid == tokens.grid and torch.equal(alone.positions, tokens.positions) and torch.equal(alone.times, tokens.times)
        assert torch.allclose(alone.features, tokens.features, atol=1e-5) and torch.allclose(alone.saliency, tokens.saliency, atol=1e-6)
    for tokens, backward in zip(together, encoder(inputs[::-1])[::-1], strict=True):
        assert torch.allclose(backward.features, tokens.features, atol=1e-5)
    assert encoder([]) == []


def test_the_same_input_gives_the_same_tokens_and_stays_as_it_was(encoder: VisionEncoder) -> None:
    item = picture(300, 200)
    before = item.pixels.clone()
    (first,), (second,) = encoder([item]), encoder([item])
    assert torch.equal(first.features, second.features) and torch.equal(item.pixels, before)
    assert not first.features.requires_grad


def test_a_clip_is_its_pictures_pooled(encoder: VisionEncoder) -> None:
    """PP-03: scores, keys and features are pooled to the same grid, cell by cell over what it really holds."""
    video = clip(3, 70, 98)
    (tokens,) = encoder([video])
    stills = encoder([Image(frame) for frame in video.frames])
    gh, gw = stills[0].grid[1:]
    assert gh % 2 and tokens.grid == (3, -(-gh // 2), -(-gw // 2)) and torch.equal(tokens.times, video.times)
    for i, (t, y, x) in enumerate(tokens.positions.tolist()):
        cell = [r * gw + c for r in range(2 * y, min(2 * y + 2, gh)) for c in range(2 * x, min(2 * x + 2, gw))]
        assert tokens.weight[i] == len(cell)
        still, keys = stills[t], stills[t].keys
        assert tokens.keys is not None and keys is not None
        assert torch.allclose(tokens.features[i], still.features[cell].mean(dim=0), atol=1e-5)
        assert torch.allclose(tokens.saliency[i], still.saliency[cell].mean(), atol=1e-6)
        assert torch.allclose(tokens.keys[i], keys[cell].mean(dim=0), atol=1e-5)


@pytest.mark.parametrize("time_pool", [1, 2, 4])
@pytest.mark.parametrize("frames", range(1, 10))
def test_steps_are_frames_by_the_pool_rounded_up(frames: int, time_pool: int) -> None:
    """VI-02, VI-03: in the count, the grid, the positions, the times and the weight alike; what lacks to a full step is not invented.

    Batches of three frames end in the middle of steps of two and of four.
    """
    video = clip(frames, 42, 70)
    encoder = Encoder(Dinov2(small()), FIT, frame_pool=1, time_pool=time_pool, batch=3)
    (tokens,) = encoder([video])
    (plain,) = Encoder(Dinov2(small()), FIT, frame_pool=1)([video])
    steps, cells = -(-frames // time_pool), len(plain) // frames
    assert tokens.grid[0] == len(tokens.times) == int(tokens.positions[:, 0].max()) + 1 == steps
    assert len(tokens) == encoder.count((42, 70), frames) == steps * cells and tokens.weight.sum() == len(plain)
    for step in range(steps):
        group = slice(step * time_pool, (step + 1) * time_pool)
        mine = tokens.positions[:, 0] == step
        assert torch.allclose(tokens.features[mine], plain.features.view(frames, cells, -1)[group].mean(dim=0), atol=1e-5)
        assert torch.allclose(tokens.times[step], video.times[group].mean())


@pytest.mark.parametrize("nothing", [torch.zeros(3, 0, 5, dtype=torch.uint8), torch.zeros(3, 0, 0, dtype=torch.uint8)])
def test_an_input_without_pixels_is_named(encoder: VisionEncoder, nothing: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"item 2 \(index 1, void\)") as caught:
        encoder([picture(14, 14), Image(nothing, "void")])
    assert caught.value.index == 1


def test_a_clip_without_frames_is_named(encoder: VisionEncoder) -> None:
    with pytest.raises(InputError, match=r"^item 1 \(index 0"):
        encoder([Video(torch.zeros(0, 3, 14, 14, dtype=torch.uint8), torch.zeros(0))])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_half_precision(dtype: torch.dtype) -> None:
    for cls, vit in ((Dinov2, small()), (Clip, small()), (Siglip, small(class_token=False))):
        expected = Encoder(cls(vit), FIT)([clip(2, 84, 84)])[0]
        (tokens,) = Encoder(cls(vit.to(dtype)), FIT)([clip(2, 84, 84)])
        assert tokens.features.dtype == dtype and tokens.saliency.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(tokens.features.float(), expected.features).min() > 0.998


def test_an_encoder_refuses_a_vit_of_another_kind() -> None:
    for cls, vit in ((Dinov2, small(class_token=False)), (Clip, small(class_token=False)), (Siglip, small())):
        with pytest.raises(ModelError, match="class token"):
            cls(vit)


@pytest.mark.parametrize("settings", [{"frame_pool": 0}, {"time_pool": 0}, {"batch": -1}])
def test_pools_and_batches_hold_at_least_one(settings: dict[str, int]) -> None:
    with pytest.raises(ModelError, match="at least 1"):
        Encoder(Dinov2(small()), FIT, **settings)


def test_any_fit_will_do() -> None:
    """A family that resizes to a square of its own brings its own fit."""

    class Square:
        def grid(self, size: tuple[int, int]) -> tuple[int, int]:
            return 2, 2

        def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.interpolate(pixels.float() / 255, (28, 28))

    fit: Fit = Square()
    encoder = Encoder(Siglip(small(class_token=False)), fit)
    assert [t.grid for t in encoder([picture(7, 300), picture(300, 7)])] == [(1, 2, 2), (1, 2, 2)]


def test_no_more_than_one_batch_is_made_ready_before_it_is_seen() -> None:
    """Inputs of one grid, several to a batch and one over several: a call of the fit is soon followed by one of the backbone."""
    waiting, most, seen = 0, 0, list[int]()

    class Watched:
        grid = staticmethod(FIT.grid)

        def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
            nonlocal waiting, most
            waiting += len(pixels)
            most = max(most, waiting)
            return FIT(pixels)

    def count(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        nonlocal waiting
        waiting = 0
        seen.append(len(given[0]))

    vit = small()
    vit.register_forward_pre_hook(count)
    Encoder(Dinov2(vit), Watched(), batch=3)([picture(84, 84), clip(7, 84, 84), picture(84, 84, 1), clip(2, 84, 84)])
    assert most == 3 and seen == [3, 3, 3, 2]


@dataclasses.dataclass(frozen=True)
class Watched:
    """A `Backbone` that notes at each call how many of the batches that it gave before are still held."""

    inner: Dinov2
    given: list[weakref.ref[torch.Tensor]]
    held: list[int]

    @property
    def vit(self) -> ViT:
        return self.inner.vit

    @property
    def width(self) -> int:
        return self.inner.width

    def __call__(self, pixels: torch.Tensor, shortening: Shortening = WHOLE) -> Sight:
        sight = self.inner(pixels, shortening)
        self.held.append(sum(batch() is not None for batch in self.given))
        self.given.append(weakref.ref(sight.features))
        return sight


@pytest.mark.parametrize("time_pool", [1, 4])
def test_a_clip_is_pooled_batch_by_batch(time_pool: int) -> None:
    """While a batch is seen, no more is there of the frames before it than the last one and what pooling left."""
    backbone = Watched(Dinov2(small(), middle=(0,)), [], [])
    video = clip(18, 84, 84)
    (tokens,) = Encoder(backbone, FIT, time_pool=time_pool, batch=3)([video])
    (expected,) = Encoder(backbone.inner, FIT, time_pool=time_pool, batch=18)([video])
    assert len(backbone.held) == 6 and max(backbone.held) <= 1
    assert torch.allclose(tokens.features, expected.features, atol=1e-5) and torch.equal(tokens.positions, expected.positions)


def test_middle_layers_stand_behind_the_final_one() -> None:
    vit = small()
    plain, more = Encoder(Dinov2(vit), FIT), Encoder(Dinov2(vit, middle=(0, 2)), FIT)
    (a,), (b,) = plain([picture(84, 84)]), more([picture(84, 84)])
    assert more.width == 3 * plain.width and torch.equal(b.features[:, :48], a.features)
    parts = b.features[:, 48:].unflatten(1, (2, 48))
    assert torch.allclose(parts.mean(dim=2), torch.zeros(36, 2), atol=1e-5)
    assert torch.allclose(parts.var(dim=2, unbiased=False), torch.ones(36, 2), atol=1e-2)


def test_real_weights_give_256_tokens_and_64_a_frame(mini_encoder: Path) -> None:
    encoder = Encoder(Dinov2(vit_from_onnx(mini_encoder)), Preprocess())
    still, moving = encoder([picture(224, 224), clip(2, 224, 224)])
    assert still.grid == (1, 16, 16) and moving.grid == (2, 8, 8)
    assert (moving.weight == 4).all() and encoder.count((224, 224)) == 256 and encoder.count((224, 224), 8) == 512
