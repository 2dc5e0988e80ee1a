"""The doors to clips and worlds: batches with errors in them, words that cannot be, and a memory that stays as small as it is."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmsdk
from mmsdk.diffusion import imagine
from mmsdk.diffusion.clip import Clip
from mmsdk.diffusion.dit import DiT, DiTConfig
from mmsdk.diffusion.filming import VideoGeneration
from mmsdk.diffusion.guidance import scale_of
from mmsdk.diffusion.imagine import SETTINGS, UPSCALER, Imaginer, open_imaginer, save_imaginer
from mmsdk.diffusion.making import Screen
from mmsdk.diffusion.rotary import Anywhere, Roaming, Spread, Waves
from mmsdk.diffusion.upscale import LatentUpscaler, bilinear, open_upscaler, save_upscaler
from mmsdk.diffusion.words import Words
from mmsdk.diffusion.world import door
from mmsdk.diffusion.world.door import World, paging
from mmsdk.diffusion.world.memory import Paging
from mmsdk.diffusion.world.model import WorldModel, save_world_model
from mmsdk.errors import InputError, ModelError, PluginError
from mmsdk.vision.intake import load_video

SPREAD = Spread(4)
CONFIG = DiTConfig(
    3, 3, 1, 12, hidden=16, layers=1, text_width=8, rotary=SPREAD, patch=(1, 2, 2), frequencies=8, order="channels_first",
    standing=Waves(SPREAD), predicts="clip",
)  # fmt: skip
MOVES = {"stay": (0.0, 0.0), "left": (0.0, -2.0), "right": (0.0, 2.0)}


def imaginer(config: DiTConfig, screen: Screen) -> Imaginer:
    torch.manual_seed(0)
    return Imaginer(DiT(config).eval().requires_grad_(False), Words(("a", "ball", "red"), 8, 4).requires_grad_(False), screen, 2.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("model")
    save_imaginer(at, imaginer(CONFIG, Screen(2, 8, 8, 4.0, 3.0)), torch.float32)
    return at


@pytest.fixture(scope="module")
def pipe(folder: Path) -> VideoGeneration:
    return mmsdk.pipeline("video-generation", folder, dtype="float32")


@pytest.fixture(scope="module")
def roaming() -> WorldModel:
    config = replace(CONFIG, rotary=Roaming(), standing=Anywhere(), layers=2, heads=2)
    return WorldModel(imaginer(config, Screen(1, 8, 8, 4.0, 3.0)), MOVES, 2)


def test_one_door_gives_a_clip_that_is_a_video_and_can_be_saved(pipe: VideoGeneration, folder: Path, tmp_path: Path) -> None:
    told: list[int] = []
    clip = pipe(
        "a red ball", seed=3, steps=4, guidance=1.5, two_stage=True, attention="nabla:1.0", cache="first_block", advance=told.append
    )
    same = open_imaginer(folder)("a red ball", seed=3, steps=4, scale=1.5, coarse=2, attention="nabla:mass=1.0", cache="first_block")
    assert isinstance(clip, mmsdk.Video) and torch.equal(clip.latents, same.latents) and told == [1, 2, 3, 4]
    assert clip.timings.total >= clip.timings.denoise > 0 and clip.seed == 3 and clip.source == "a red ball"
    assert load_video(clip.save(tmp_path / "a.gif")).size == (256, 256) and "Clip(frames=uint8[2, 3, 8, 8]" in repr(clip)


def test_a_batch_has_errors_in_their_places_and_clips_as_alone(pipe: VideoGeneration) -> None:
    told: list[int] = []
    some = pipe(["a ball", "a blue ball", "red"], seed=[1, 2, 3], steps=2, advance=told.append)
    one, wrong, other = some
    assert isinstance(one, Clip) and isinstance(other, Clip) and isinstance(wrong, InputError) and wrong.index == 1
    assert torch.equal(one.latents, pipe("a ball", seed=1, steps=2).latents) and torch.equal(
        other.latents, pipe("red", seed=3, steps=2).latents
    )
    assert told == [1, 2, 5, 6] and pipe([]) == []


def test_sizes_shares_and_what_guidance_goes_from_matter(pipe: VideoGeneration) -> None:
    plain = pipe("a ball", steps=4)
    assert pipe("a ball", steps=4, frames=3, height=4, width=12).frames.shape == (3, 3, 4, 12)
    assert not torch.equal(pipe("a ball", steps=4, against="red").latents, plain.latents)
    half, share, count = (pipe("a ball", steps=4, two_stage=how).latents for how in (True, 0.5, 2))
    assert torch.equal(half, share) and torch.equal(half, count) and not torch.equal(half, plain.latents)
    assert torch.equal(pipe("a ball", steps=4, two_stage=0).latents, plain.latents)


@pytest.mark.parametrize(
    ("words", "error", "told"),
    [
        ({"seed": -1}, InputError, "seed"),
        ({"seed": [1, 2]}, InputError, "2 seeds for 1 texts"),
        ({"steps": 0}, InputError, "at least 1"),
        ({"steps": True}, InputError, "at least 1"),
        ({"guidance": float("nan")}, InputError, "expected a number"),
        ({"two_stage": 1.0}, InputError, "share below 1.0"),
        ({"two_stage": 20}, InputError, "below the 20 steps"),
        ({"frames": -1}, InputError, "whole number"),
        ({"height": 7}, InputError, "multiples of 2"),
        ({"attention": "svg3"}, PluginError, "svg2"),
        ({"attention": "sta:0.5"}, PluginError, "no share to set"),
        ({"cache": "tea"}, PluginError, "teacache"),
    ],
)
def test_what_cannot_be_made_is_told_before_a_step_is_taken(
    words: dict[str, Any], error: type[Exception], told: str, pipe: VideoGeneration
) -> None:
    steps: list[int] = []
    with pytest.raises(error, match=told):
        pipe(**{"text": "a ball", "advance": steps.append} | words)
    assert not steps


def test_what_ends_a_call_and_what_is_no_number(pipe: VideoGeneration, folder: Path) -> None:
    def enough(step: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipe("a ball", advance=enough)
    broken = open_imaginer(folder)
    broken.model.out.bias.data.fill_(float("nan"))
    with pytest.raises(ModelError, match="no numbers"):
        VideoGeneration(broken)("a ball", steps=1)


@pytest.mark.parametrize(
    ("task", "words", "told"),
    [
        ("video-generation", {"model": "mini"}, "none comes with mmsdk yet.*train_video"),
        ("video-generation", {"compress": "uniform:4"}, "compress: 'uniform:4' is for 'image-text-to-text'"),
        ("video-generation", {"kv": "paged"}, "kv: 'paged' is for"),
        ("world-model", {"model": "mini"}, "--kind world"),
        ("world-model", {"quantize": "int4"}, "quantize: 'int4' is for"),
        ("world-model", {"kv": "snapkv:4"}, "is no memory of a world"),
        ("world-model", {"kv": "pages:fast=two"}, "the knobs of pages are frames, sinks"),
        ("world-model", {"kv": "pages:fast=2"}, "the fast tier holds 2"),
        ("world-model", {"kv": "pages:index=best"}, "mean or bounds"),
        ("world-model", {"dtype": "float31"}, "float32"),
    ],
)
def test_arguments_of_another_task_and_models_that_are_not_there(task: Any, words: dict[str, Any], told: str, folder: Path) -> None:
    with pytest.raises(mmsdk.MmsdkError, match=told):
        mmsdk.pipeline(task, **{"model": folder} | words)


def test_a_folder_of_neither_kind_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither model_index.json nor config.json"):
        mmsdk.pipeline("video-generation", tmp_path)


def test_an_upscaler_beside_the_model_is_used_and_one_of_something_else_refused(folder: Path, tmp_path: Path) -> None:
    save_imaginer(tmp_path, open_imaginer(folder), torch.float32)
    upscaler = LatentUpscaler(3, 4, 2)
    torch.nn.init.normal_(upscaler.leave.weight)
    save_upscaler(tmp_path / UPSCALER, upscaler, torch.float32)
    opened, latents = open_upscaler(tmp_path / UPSCALER, 3), torch.randn(1, 3, 2, 4, 4)
    torch.testing.assert_close(opened(latents, (8, 8)), upscaler(latents, (8, 8)))
    with_it, without = (open_imaginer(at)("a ball", steps=2, coarse=1).latents for at in (tmp_path, folder))
    assert not torch.equal(with_it, without) and not torch.equal(opened(latents, (8, 8)), bilinear(latents, (8, 8)))
    with pytest.raises(ModelError, match="no upscaler of 4 channels"):
        open_upscaler(tmp_path / UPSCALER, 4)


def frames(world: World, actions: list[str], seed: int = 5) -> torch.Tensor:
    return torch.stack([world.reset(seed, text="a ball").pixels, *[world.step(action).pixels for action in actions]])


def test_a_world_goes_by_actions_and_where_pages_lie_changes_no_frame(roaming: WorldModel, tmp_path: Path) -> None:
    there_and_back = ["left"] * 4 + ["stay"] + ["right"] * 4
    near, far = Paging(1, 1, 2, 2, fast=50, host=50), Paging(1, 1, 2, 2, fast=6, host=1)
    save_world_model(tmp_path / "model", roaming, torch.float32)
    with World(roaming, pages=near, folder=tmp_path) as one, mmsdk.pipeline("world-model", tmp_path / "model", dtype="float32") as opened:
        opened._paging, opened._folder = far, tmp_path / "far"
        assert opened.actions == tuple(MOVES) and opened.model.steps == 2
        first, second = frames(one, there_and_back), frames(opened, there_and_back)
        assert torch.equal(first, second) and one.frames == 10 and one.latest.frames.shape == (1, 3, 8, 8)
        assert max(disk for _, _, disk in opened.resident) > 0 == max(disk for _, _, disk in one.resident)
        # frames are told apart by seeds, actions and what came before
        assert torch.equal(frames(one, there_and_back), first)
        assert not torch.equal(frames(one, ["right", *there_and_back[1:]])[-1], first[-1])
        assert not torch.equal(frames(one, there_and_back, 6)[0], first[0])


def test_a_world_begins_with_a_picture_and_refuses_what_is_no_action(roaming: WorldModel, tmp_path: Path) -> None:
    picture = np.full((16, 24, 3), 200, np.uint8)
    with World(roaming, folder=tmp_path) as world:
        with pytest.raises(InputError, match="begin with reset"):
            world.step("left")
        assert (world.reset(first=picture).pixels == 200).all() and world.frames == 1
        with pytest.raises(InputError, match="did you mean 'left'"):
            world.step("lefd")
        assert world.frames == 1 and world.step("left").source == "frame 2"
        with pytest.raises(InputError, match="is none of them"):
            world.reset(text="a dog")
        for guidance in (float("nan"), float("inf")):
            with pytest.raises(InputError, match="guidance: it is .*expected a number"):
                world.reset(guidance=guidance)
        with pytest.raises(InputError, match="seed, steps: .* below"):
            world.reset(2**63)
        assert world.frames == 2, "what could not begin has ended nothing"
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "pages go with their world"


def test_a_step_that_is_broken_off_ends_the_world(roaming: WorldModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with World(roaming, folder=tmp_path) as world:
        world.reset()
        before = world.step("left").pixels

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as broken:
            broken.setattr(door, "remember", interrupted)
            with pytest.raises(KeyboardInterrupt):
                world.step("left")
        with pytest.raises(InputError, match="begin with reset"):
            world.step("left")
        world.reset()
        assert torch.equal(world.step("left").pixels, before)


def test_a_frame_that_is_no_number_is_told_and_not_remembered(tmp_path: Path) -> None:
    broken = imaginer(replace(CONFIG, rotary=Roaming(), standing=Anywhere()), Screen(1, 8, 8, 4.0, 3.0))
    broken.model.out.bias.data.fill_(float("nan"))
    with World(WorldModel(broken, MOVES, 1), folder=tmp_path) as world:
        with pytest.raises(ModelError, match="frame 1 has values that are no numbers"):
            world.reset()
        with pytest.raises(InputError, match="begin with reset"):
            world.step("left")


def test_how_far_guidance_goes_is_a_number_or_left_to_the_model() -> None:
    assert scale_of(None) is None and scale_of(3) == 3.0 and scale_of(-1.5) == -1.5
    for wrong in ("3", True, float("nan"), 1e9, [3.0]):
        with pytest.raises(InputError, match="guidance"):
            scale_of(wrong)


def test_a_folder_under_the_home_folder_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert mmsdk.pipeline("world-model", f"~/{folder.name}", dtype="float32").actions == ()


def test_a_world_that_is_broken_off_while_it_is_written_is_none(
    roaming: WorldModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings come last and all at once: there is never a folder that opens as a world without its moves."""
    written = list[str]()

    def noted(path: Path, content: bytes) -> None:
        written.append(path.name)
        if path.name == SETTINGS:
            assert set(json.loads(content)["moves"]) == set(MOVES)
            raise KeyboardInterrupt

    monkeypatch.setattr(imagine, "write", noted)
    with pytest.raises(KeyboardInterrupt):
        save_world_model(tmp_path, roaming)
    assert written == [SETTINGS] and not (tmp_path / SETTINGS).exists()


def test_a_model_of_clips_goes_on_by_texts(folder: Path, tmp_path: Path) -> None:
    with mmsdk.pipeline("world-model", folder, dtype="float32", kv="window:4") as world:
        world._folder = tmp_path
        world.reset(text="a ball", guidance=2.0)
        one, other = world.step().pixels, world.step("red").pixels
        assert world.frames == 6 and world.latest.times.tolist() == [1.0, 1.25] and not torch.equal(one, other)
        assert len(world.resident) == 2, "one layer, with and without the text"


def test_many_frames_take_no_more_memory(roaming: WorldModel, tmp_path: Path) -> None:
    """Pages in memory never exceed their tiers, and nothing else but the index, three tokens a page and head, is kept of a frame."""
    pages = Paging(sinks=1, recent=2, recalled=2, fast=7, host=3)
    actions, held = itertools.cycle(["left", "left", "right", "stay", "right"]), list[int]()
    with World(roaming, pages=pages, folder=tmp_path) as world:
        world.reset(0, text="a ball", steps=1)
        for number in range(1, 120):
            world.step(next(actions))
            assert all(fast <= 7 and host <= 3 for fast, host, _ in world.resident)
            if number % 40 == 39:
                held.append(kept(world))
        assert len(held) == 3 and len(set(held)) == 1, held


def kept(world: World) -> int:
    """Bytes of the keys and values in memory, and of the sums, of all layers."""
    assert world._memory is not None
    found = 0
    for layer in world._memory._layers.values():
        pairs = [*layer.tiers._fast.values(), *(pair for pair in layer.tiers._host.values() if isinstance(pair, tuple))]
        found += sum(part.untyped_storage().nbytes() for pair in pairs for part in pair)
        found += sum(part.untyped_storage().nbytes() for sums in layer._sums for part in (sums.products, sums.keys))
    return found


def test_windows_are_pages_of_the_latest_frames() -> None:
    assert paging("window:8") == Paging(sinks=0, recent=8, recalled=0, fast=9, host=1)
    assert paging("pages:recalled=8,fast=32,index=mean") == Paging(recalled=8, fast=32, index="mean")
    with pytest.raises(InputError, match="holds 7"):
        paging("pages:fast=7")
    for digits in ("window:٣٠", "pages:recalled=٨"):
        with pytest.raises(PluginError):
            paging(digits)


def test_a_world_of_several_threads_makes_each_step_to_its_end(roaming: WorldModel, tmp_path: Path) -> None:
    """The frames are those of one thread that does the same in the same order; who looks on while they are made sees whole steps."""
    made = dict[int, tuple[str, torch.Tensor]]()

    def go(action: str) -> None:
        for _ in range(4):
            frame = world.step(action)
            made[int(frame.source.removeprefix("frame "))] = action, frame.pixels
            assert len(world.resident) > 0 and len(world.latest.frames) == 1

    with World(roaming, folder=tmp_path) as world:
        world.reset(5, text="a ball")
        with ThreadPoolExecutor(3) as pool:
            for ended in [pool.submit(go, action) for action in ("left", "right", "stay")]:
                ended.result()
        assert world.frames == 13 and sorted(made) == list(range(2, 14))
        taken = [made[number] for number in sorted(made)]
        assert torch.equal(frames(world, [action for action, _ in taken])[1:], torch.stack([pixels for _, pixels in taken]))


def test_a_step_within_a_step_is_told(roaming: WorldModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a handler of signals: the thread would wait for itself. What broke off ends the world, as ever."""
    with World(roaming, folder=tmp_path) as world:
        world.reset()
        with monkeypatch.context() as broken:
            broken.setattr(door, "remember", lambda *_: world.close())
            with pytest.raises(InputError, match="world: this thread is still changing it"):
                world.step("left")
        assert world.frames == 0
        with pytest.raises(InputError, match="begin with reset"):
            world.latest  # noqa: B018
