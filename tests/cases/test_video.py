"""Clips: public bug reports turned into required behaviour, one test a case."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from mmsdk.errors import InputError
from mmsdk.models.mini.projector import place_features
from mmsdk.prompt import Ids, Layout, Slot
from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.intake import Frames, Sampling, load, load_video
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.types import Video
from mmsdk.vision.vit import ViT, ViTConfig


def clip(path: Path, count: int, rate: float = 10.0, size: tuple[int, int] = (64, 48), codec: str = "mp4v") -> Path:
    """`count` frames, each a little brighter than the one before."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*codec), rate, size)
    assert writer.isOpened()
    for place in range(count):
        writer.write(np.full((size[1], size[0], 3), 2 * place, np.uint8))
    writer.release()
    return path


def encoder(time_pool: int = 1) -> Encoder:
    vit = ViT(ViTConfig(width=16, layers=2, heads=2, hidden=16, grid=4)).eval()
    return Encoder(Dinov2(vit), Preprocess(area=16), time_pool=time_pool)


def test_vi_01_a_clip_without_frames_is_an_error_that_names_it(tmp_path: Path) -> None:
    data = clip(tmp_path / "a.avi", 3, codec="MJPG").read_bytes()
    (tmp_path / "none.avi").write_bytes(data[: data.index(b"movi") + 4])
    with pytest.raises(InputError, match="none.avi"):
        load(tmp_path / "none.avi")
    for nothing in ([], np.zeros((0, 4, 4, 3), np.uint8), torch.zeros(0, 3, 4, 4), Frames([])):
        with pytest.raises(InputError, match="no frames"):
            load(nothing)


def test_vi_02_one_frame(tmp_path: Path) -> None:
    video = load(clip(tmp_path / "a.mp4", 1))
    assert isinstance(video, Video) and video.frames.shape == (1, 3, 48, 64) and video.times.tolist() == [0.0]


def test_vi_02_one_frame_fills_a_step_of_two_by_itself() -> None:
    pictures = load_video(Frames([np.full((48, 64, 3), 9, np.uint8)], times=(2.5,)))
    (tokens,) = encoder(time_pool=2)([pictures])
    assert tokens.times.tolist() == [2.5] and tokens.grid[0] == 1
    assert len(tokens) == encoder(time_pool=2).count((48, 64), 1) and (tokens.weight == 1).all()


def test_vi_04_ten_seconds_give_exactly_five_rising_frames(tmp_path: Path) -> None:
    video = load_video(clip(tmp_path / "a.mp4", 100), sampling=Sampling(frames=5))
    torch.testing.assert_close(video.times, torch.tensor([1.0, 3.0, 5.0, 7.0, 9.0]))
    levels = video.frames.float().mean(dim=(1, 2, 3))
    assert (levels - 2 * torch.tensor([10.0, 30, 50, 70, 90])).abs().max() <= 4


@pytest.mark.parametrize("rate", [2.5, 29.97])
def test_vi_07_fractional_rates_are_kept(tmp_path: Path, rate: float) -> None:
    video = load_video(clip(tmp_path / "a.avi", 10, rate, codec="MJPG"), sampling=Sampling(frames=10))
    torch.testing.assert_close(video.times, torch.arange(10) / rate, atol=2e-3, rtol=0)


def test_vi_07_a_sampling_of_half_a_frame_a_second() -> None:
    assert Sampling(fps=0.5).indices(100, 10.0) == [0, 20, 40, 60, 80]
    assert Sampling(fps=2.5).indices(10, 10.0) == [0, 4, 8]


@pytest.mark.parametrize(("rate", "seconds"), [(2.5, 0.8), (0.5, 4.0)])
def test_vi_07_a_step_of_two_frames_lasts_as_long_as_both(rate: float, seconds: float) -> None:
    pictures = [np.full((28, 28, 3), 10 * place, np.uint8) for place in range(8)]
    (tokens,) = encoder(time_pool=2)([load_video(Frames(pictures, fps=rate), sampling=Sampling(frames=8))])
    torch.testing.assert_close(tokens.times.diff(), torch.full((3,), seconds))


@pytest.mark.parametrize("rate", [5.0, 10.0, 29.97])
def test_vi_08_rates_above_two_give_every_step_a_place_of_its_own(tmp_path: Path, rate: float) -> None:
    video = load_video(clip(tmp_path / "a.avi", 12, rate, codec="MJPG"), sampling=Sampling(fps=rate))
    (tokens,) = encoder()([video])
    steps, cells = tokens.grid[0], tokens.grid[1] * tokens.grid[2]
    assert steps == 12 and torch.equal(tokens.positions[:, 0], torch.arange(12).repeat_interleave(cells))
    torch.testing.assert_close(tokens.times, torch.arange(12) / rate, atol=2e-3, rtol=0)
    assert (place_features(tokens).view(steps, cells, -1)[:, 0, 0].diff() > 0).all()
    layout = Layout((Ids((1,)), Slot(0), Ids((2, 3))), media=1)
    assert (layout.positions([len(tokens)]).diff() == 1).all()


def test_vi_09_frames_with_their_own_times_are_taken_as_they_are() -> None:
    pictures = [np.full((4, 6, 3), level, np.uint8) for level in (0, 100, 200)]
    video = load_video(Frames(pictures, times=(0.0, 0.4, 0.8)), sampling=Sampling(frames=2))
    torch.testing.assert_close(video.times, torch.tensor([0.0, 0.4, 0.8]))
    assert video.frames[:, 0, 0, 0].tolist() == [0, 100, 200]


def test_vi_13_a_clip_cut_short_gives_the_frames_before_the_cut_or_an_error(tmp_path: Path) -> None:
    data = clip(tmp_path / "a.avi", 50, codec="MJPG").read_bytes()
    video = load_video(data[: len(data) * 7 // 10])
    levels = video.frames.float().mean(dim=(1, 2, 3))
    assert (levels.diff() > 0).all() and levels.max() <= 72
    data = clip(tmp_path / "a.mp4", 50).read_bytes()
    with pytest.raises(InputError, match="truncated or corrupt"):
        load_video(data[: len(data) * 7 // 10])


def test_vi_14_odd_sizes_are_kept(tmp_path: Path) -> None:
    frame = b"FRAME\n" + bytes([128]) * (3 * 639 * 359)
    (tmp_path / "a.y4m").write_bytes(b"YUV4MPEG2 W639 H359 F10:1 Ip A1:1 C444\n" + 2 * frame)
    assert load(tmp_path / "a.y4m").size == (359, 639)
