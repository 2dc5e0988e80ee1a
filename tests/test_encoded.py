"""Encoded once, asked often: pictures and clips whose tokens are kept aside, and clips whose frames come one after another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import jaxtyping
import pytest
import torch

from mmsdk.answer import Answer
from mmsdk.compress import compression
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.transformer import Decoder
from mmsdk.encoded import Encoded
from mmsdk.errors import InputError, PluginError
from mmsdk.models.mini.family import Mini
from mmsdk.models.mini.projector import Projector, ProjectorConfig
from mmsdk.pipeline import Pipeline
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.methods.uniform import Uniform
from mmsdk.tokencomp.types import Compressed
from mmsdk.tokenizer import TextTokenizer
from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.types import Image, Media, Video, VisualTokens
from mmsdk.vision.vit import ViT, ViTConfig
from mmsdk.weights.gguf_file import read_file
from mmsdk.weights.gguf_tokenizer import tokenizer_of

SPECS: list[str | list[str]] = ["identity", "simplecluster:0.25", "divprune:4", "visionzip:6", "deft:0.25", ["uniform:0.5", "fastv:0.5"]]


@dataclass(frozen=True, slots=True)
class Counting:
    """An encoder that notes how many inputs it was given."""

    inner: Encoder
    calls: list[int]

    @property
    def width(self) -> int:
        return self.inner.width

    def count(self, size: tuple[int, int], frames: int = 1) -> int:
        return self.inner.count(size, frames)

    def __call__(self, media: Sequence[Media]) -> list[VisualTokens]:
        self.calls.append(len(media))
        return self.inner(media)


@pytest.fixture(scope="module")
def pipe(mini_language: Path) -> Pipeline:
    torch.manual_seed(0)
    vit = ViT(ViTConfig(width=32, layers=3, heads=2, hidden=64, grid=4)).eval().requires_grad_(False)
    torch.nn.init.normal_(vit.position)
    sizes = {"width": 48, "layers": 6, "heads": 4, "kv_heads": 2, "head_dim": 12, "inner": 96, "context": 512}
    decoder = Decoder(DecoderConfig(vocabulary=49152, **sizes)).eval().requires_grad_(False)
    torch.nn.init.normal_(decoder.embedding.weight)
    torch.nn.init.normal_(decoder.head.weight, std=0.5)
    projector = Projector(ProjectorConfig(vision=32, hidden=32, language=48)).eval().requires_grad_(False)
    tokenizer = tokenizer_of(read_file(mini_language).metadata)
    assert isinstance(tokenizer, TextTokenizer)
    return Pipeline(Mini("small", Encoder(Dinov2(vit), Preprocess(area=16)), projector, decoder, tokenizer, context=512))


def picture(seed: int, height: int = 56, width: int = 56) -> Image:
    generator = torch.Generator().manual_seed(seed)
    return Image(torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator), f"picture {seed}")


def clip(seed: int, frames: int = 4) -> Video:
    return Video(torch.stack([picture(100 * seed + i).pixels for i in range(frames)]), torch.arange(frames) * 0.5, f"clip {seed}")


def counted(pipe: Pipeline) -> tuple[Pipeline, list[int]]:
    parts = {name: getattr(pipe.vlm, name) for name in ("name", "decoder", "tokenizer", "stop_ids", "context", "connect", "layout")}
    calls: list[int] = []
    assert isinstance(pipe.vlm, Mini)
    return Pipeline(SimpleNamespace(encoder=Counting(pipe.vlm.encoder, calls), **parts)), calls  # type: ignore[arg-type]  # a VLM by its parts


def told(answer: object) -> tuple[object, ...]:
    assert isinstance(answer, Answer)
    return (
        str(answer),
        answer.tokens,
        answer.finish,
        [sight.source for sight in answer.sights],
        [a.assignment.tolist() for a in answer.audit],
    )


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_later_question_is_answered_as_the_first_would_be_without_the_encoder(pipe: Pipeline, spec: str | list[str]) -> None:
    asking, calls = counted(pipe)
    for media in (picture(0), clip(1)):
        seen = asking.encode(media)
        assert isinstance(seen, Encoded) and calls.pop() == 1
        for question in ("What is it?", "Which colour is the one on the left?", "Why?"):
            answer = asking(seen, question, max_tokens=6, compress=spec)
            assert told(answer) == told(pipe(media, question, max_tokens=6, compress=spec))
        assert sum(calls) == 0


def test_each_question_chooses_from_all_tokens_anew(pipe: Pipeline) -> None:
    """What one question left is not what the next one starts from, and nothing of the copy changes."""
    seen = pipe.encode(picture(0))
    before = seen.tokens.features.clone()
    kept = [pipe(seen, question, max_tokens=1, compress="deft:4,reserve=1.0") for question in ("What?", "How many are there, and where?")]
    assert all(answer.tokens.visual == 16 and answer.tokens.kept == 4 for answer in kept)
    assert kept[0].audit[0].assignment.tolist() != kept[1].audit[0].assignment.tolist()
    assert torch.equal(seen.tokens.features, before) and len(seen) == 16


def test_it_stands_wherever_a_picture_may(pipe: Pipeline) -> None:
    """In a batch, among other inputs of one question, and in a stream."""
    asking, calls = counted(pipe)
    media = [picture(0), clip(1), picture(2, 28, 84)]
    seen = [asking.encode(item) for item in media]
    calls.clear()
    mixed = asking(
        [(seen[0], "What?"), ([seen[1], media[2]], "Which?"), (media[0], "Why?"), ([], "Why?")], max_tokens=5, compress="uniform:0.5"
    )
    plain = pipe(
        [(media[0], "What?"), ([media[1], media[2]], "Which?"), (media[0], "Why?"), ([], "Why?")], max_tokens=5, compress="uniform:0.5"
    )
    assert [told(answer) for answer in mixed] == [told(answer) for answer in plain] and sum(calls) == 2
    assert told(asking.stream(seen, "Which?", max_tokens=5).answer) == told(pipe(media, "Which?", max_tokens=5))


def test_turns_with_and_without_a_picture_do_not_change_each_other(pipe: Pipeline) -> None:
    """PP-08: a picture, words alone, another picture; the same answers at each of 20 repetitions."""
    first, second = pipe.encode(picture(0)), pipe.encode(clip(1))
    rounds = [
        [told(pipe(media, "What is it?", max_tokens=3, compress="simplecluster:0.25")) for media in (first, [], second, first)]
        for _ in range(20)
    ]
    assert all(turns == rounds[0] for turns in rounds) and rounds[0][0] == rounds[0][3] != rounds[0][2]


def test_a_step_inside_the_encoder_comes_too_late(pipe: Pipeline) -> None:
    seen = pipe.encode(picture(0))
    with pytest.raises(InputError, match=r"picture 0.*tome works inside the encoder.*picture itself"):
        pipe(seen, "What?", compress="tome:0.5")
    good, late = pipe([(picture(0), "What?"), (seen, "What?")], max_tokens=3, compress="tome:0.5")
    assert isinstance(good, Answer) and isinstance(late, InputError) and late.index == 1


def test_another_model_cannot_read_it(pipe: Pipeline) -> None:
    assert isinstance(pipe.vlm, Mini)
    other = Pipeline(replace(pipe.vlm, name="other"))
    with pytest.raises(InputError, match="encoded by 'small'.*'other'"):
        other(pipe.encode(picture(0)), "What?")
    narrow = replace(pipe.encode(picture(0)).tokens, features=torch.zeros(16, 8))
    with pytest.raises(InputError, match="8 wide.*32"):
        pipe(replace(pipe.encode(picture(0)), tokens=narrow), "What?")


def test_what_cannot_be_encoded_is_told_at_once(pipe: Pipeline) -> None:
    with pytest.raises(InputError, match="missing.png"):
        pipe.encode("missing.png")
    with pytest.raises(InputError, match="one by one"):
        pipe.encode([picture(0), picture(1)])


@pytest.mark.parametrize("frames", [1, 2, 7, 8, 9, 16, 17])
def test_a_clip_that_comes_in_frames_is_the_clip(pipe: Pipeline, frames: int) -> None:
    """As long as everything is held; also where the last window has one frame."""
    video = clip(1, frames)
    watch = pipe.watch("simplecluster", hold=512)
    for pixels, seconds in zip(video.frames, video.times.tolist(), strict=True):
        watch.push(Image(pixels), seconds)
    seen, (whole,) = watch.encoded(), pipe.vlm.encoder([video])
    assert seen.tokens.grid == whole.grid and seen.full == len(seen) == len(whole)
    assert torch.equal(seen.tokens.positions, whole.positions) and torch.equal(seen.tokens.weight, whole.weight)
    torch.testing.assert_close(seen.tokens.times, whole.times)
    torch.testing.assert_close(seen.tokens.features, whole.features, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(seen.tokens.saliency, whole.saliency, rtol=1e-3, atol=1e-5)


def test_it_can_be_asked_at_any_time_and_goes_on(pipe: Pipeline) -> None:
    video, watch = clip(2, 11), pipe.watch("simplecluster", hold=512, window=4)
    for number, (pixels, seconds) in enumerate(zip(video.frames, video.times.tolist(), strict=True), start=1):
        watch.push(pixels, seconds)
        so_far = pipe.vlm.encoder([Video(video.frames[:number], video.times[:number])])[0]
        torch.testing.assert_close(watch.encoded().tokens.features, so_far.features, rtol=1e-4, atol=1e-4)
    answer = pipe(watch.encoded(), "What happens?", max_tokens=4, compress="simplecluster:6")
    assert told(answer)[1:3] == told(pipe(video, "What happens?", max_tokens=4, compress="simplecluster:6"))[1:3]


@pytest.mark.parametrize("hold", [3, 20, 41])
def test_evs_holds_what_it_would_keep_of_the_whole_clip(pipe: Pipeline, hold: int) -> None:
    """Also where the first frame alone is more than may be held; frames repeat, so that not everything is new."""
    frames = torch.stack([picture(i // 3).pixels if i % 7 else picture(50 + i).pixels for i in range(21)])
    video, watch = Video(frames, torch.arange(21.0)), pipe.watch("evs", hold=hold)
    for pixels, seconds in zip(frames, video.times.tolist(), strict=True):
        watch.push(pixels, seconds)
    (whole,) = compression(f"evs:{hold}")(pipe.vlm.encoder([video]))
    seen = watch.encoded()
    assert torch.equal(seen.tokens.positions, whole.tokens.positions) and seen.full == 21 * 4
    torch.testing.assert_close(seen.tokens.features, whole.tokens.features, rtol=1e-4, atol=1e-4)
    assert pipe(seen, "What?", max_tokens=1, compress=f"evs:{hold}").tokens.kept == hold


@pytest.mark.parametrize("by", ["simplecluster", "divprune", "visionzip", "uniform", "random:seed=3", "fastvid", "evs"])
def test_memory_does_not_grow_with_the_clip(pipe: Pipeline, by: str) -> None:
    watch = pipe.watch(by, hold=24, window=4)
    for number in range(36):
        watch.push(picture(number).pixels, number / 10)
        held = watch.encoded().tokens
        assert len(held) <= 24 and held.features.untyped_storage().nbytes() <= (24 + 4 * 4) * 32 * 4
        assert len(watch._now[1].frames) < 4
    assert held.grid == (36, 2, 2) and int(held.positions[:, 0].max()) > 30
    order = (held.positions * torch.tensor([4, 2, 1])).sum(dim=1)
    assert bool((order[1:] > order[:-1]).all())
    if by == "simplecluster":
        assert float(held.weight.sum()) == 36 * 16
    assert "144 tokens of 36 frames" in watch.encoded().notes[0]


def test_no_plan_is_as_large_as_the_clip_has_become(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six tokens are of six frames at most, and those of a window come with them."""
    grids, original = list[tuple[int, int, int]](), Uniform.__call__

    def noted(by: Uniform, tokens: Sequence[VisualTokens], budgets: Sequence[Budget], query: None = None) -> list[Compressed]:
        for one in tokens:
            grids.append(one.grid)
            assert one.grid[0] == len(one.positions[:, 0].unique()) == len(one.times) and int(one.positions[:, 0].max()) < one.grid[0]
        return original(by, tokens, budgets, query)

    monkeypatch.setattr(Uniform, "__call__", noted)
    watch = pipe.watch("uniform", hold=6, window=4)
    for number in range(36):
        watch.push(picture(number).pixels, number / 10)
    held = watch.encoded().tokens
    assert held.grid == (36, 2, 2) and int(held.positions[:, 0].max()) > 30
    assert grids and max(frames for frames, _, _ in grids) <= 6 + 4


def test_frames_that_do_not_fit_are_named_and_leave_no_trace(pipe: Pipeline) -> None:
    watch = pipe.watch(hold=64)
    with pytest.raises(InputError, match="no frame has come yet"):
        watch.encoded()
    watch.push(picture(0), 1.0)
    for frame, seconds, hint in (
        (picture(1, 28, 84), 2.0, "frame 1.*one size"),
        (picture(1), 1.0, "rising"),
        (picture(1), float("nan"), "finite"),
    ):
        with pytest.raises(InputError, match=hint):
            watch.push(frame, seconds)
    with pytest.raises(InputError, match=r"^frame 1 \(missing.png\): there is no such file"):
        watch.push("missing.png", 2.0)
    watch.push(picture(2), 2.0)
    assert watch.encoded().tokens.times.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("seconds", [None, "2", 10**400, 1e308, math.inf, [2.0], 2j], ids=lambda seconds: f"{seconds!r:.9}")
def test_times_that_are_none_are_named(pipe: Pipeline, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # without the check of types at every call, as users run it
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    watch = pipe.watch(hold=64)
    watch.push(picture(0), 1.0)
    with pytest.raises(InputError, match=r"^frame 1: is of .* finite, rising times"):
        watch.push(picture(1), seconds)


def test_what_was_assumed_of_a_frame_is_told_once_of_the_stream(pipe: Pipeline) -> None:
    watch = pipe.watch(hold=64)
    for place in range(3):
        watch.push(replace(picture(place), notes=("cropped",) if place else ()), float(place))
    assert watch.encoded().notes == ("cropped",)


def test_methods_that_cannot_watch_are_refused(pipe: Pipeline) -> None:
    for by, hint in (
        ("tome", "between"),
        ("fastv", "between"),
        ("cdpruner", "question"),
        ("simplecluster:64", "hold"),
        ("smplecluster", "simplecluster"),
    ):
        with pytest.raises(PluginError, match=hint):
            pipe.watch(by)
    with pytest.raises(InputError, match="hold 2 or more"):
        pipe.watch(hold=1)
    with pytest.raises(InputError, match="window"):
        pipe.watch(window=1)


@pytest.mark.parametrize(("setting", "value"), [("by", 5), ("by", None), ("hold", None), ("hold", 2.5), ("window", None), ("window", "8")])
def test_settings_of_a_watch_that_are_of_another_kind_are_named(
    pipe: Pipeline, setting: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    # without the check of types at every call, as users run it
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises((InputError, PluginError), match="window|hold|names no method"):
        pipe.watch(**{setting: value})
