"""One frame of each scene: cuts found where FFmpeg's own filter finds them, in files, animations and lists of frames alike."""

import weakref
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import PIL.Image
import pytest
import torch

from mmsdk.errors import InputError
from mmsdk.vision.intake import Frames, Sampling, load_video
from mmsdk.vision.intake.access import ACCESS
from mmsdk.vision.intake.limits import LIMITS
from mmsdk.vision.intake.opencv import OpenCVReader
from mmsdk.vision.intake.pyav import PyAVReader
from mmsdk.vision.intake.reader import Open
from mmsdk.vision.intake.scenes import changes
from mmsdk.vision.intake.source import opened
from mmsdk.vision.intake.video import decode_clip
from mmsdk.vision.types import Video

av = pytest.importorskip("av", reason="clips are written with PyAV, from mmsdk[video]")

READERS = [pytest.param(OpenCVReader.of, id="opencv"), pytest.param(PyAVReader.of, id="pyav")]
SCENES = (7, 12, 1, 20, 5, 9)  # frames of each; the third is a flash
CUTS = [7, 19, 20, 40, 45]


def film(seed: int = 3) -> list[npt.NDArray[np.uint8]]:
    """Scenes of soft random colours that pan along, as `SCENES` counts them."""
    noise, frames = np.random.default_rng(seed), list[npt.NDArray[np.uint8]]()
    for number, count in enumerate(SCENES):
        wide = cv2.resize(noise.integers(0, 256, (4, 8, 3), dtype=np.uint8), (192, 72), interpolation=cv2.INTER_CUBIC)
        wide = np.full_like(wide, 255) if number == 2 else wide // 2 + np.uint8(100 * (number % 2))
        frames += [wide[:, 2 * place : 2 * place + 96] for place in range(count)]
    return frames


def written(path: Path, ticks: list[int] | None = None) -> Path:
    base = Fraction(1, 1000)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10, options={"crf": "12"})
        stream.width, stream.height, stream.pix_fmt, stream.codec_context.time_base = 96, 72, "yuv420p", base
        for place, pixels in enumerate(film()):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts, frame.time_base = (ticks[place] if ticks else 100 * place), base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def by_ffmpeg(path: Path, score: float) -> list[float]:
    """The times of the frames that FFmpeg's filter `select` lets through for their scene's score."""
    times = []
    with av.open(str(path)) as container:
        graph = av.filter.Graph()
        source, select, sink = graph.add_buffer(template=container.streams.video[0]), graph.add("select", f"gt(scene\\,{score})"), None
        sink = graph.add("buffersink")
        source.link_to(select)
        select.link_to(sink)
        graph.configure()
        for frame in container.decode(video=0):
            graph.push(frame)
            try:
                found = graph.pull()
                times.append(float(found.pts * found.time_base))
            except av.BlockingIOError:
                pass
    return times


def read(path: Path, reader: Open, sampling: Sampling) -> Video:
    with opened(path, LIMITS, ACCESS) as found:
        return decode_clip(found, sampling, LIMITS, (255, 255, 255), reader)


@pytest.mark.parametrize("reader", READERS)
def test_scenes_are_cut_where_ffmpeg_cuts_them(tmp_path: Path, reader: Open) -> None:
    path = written(tmp_path / "a.mp4")
    cuts = by_ffmpeg(path, 0.3)
    assert len(cuts) >= 4 and {round(10 * cut) for cut in cuts} <= set(CUTS)
    video = read(path, reader, Sampling(scenes=0.3))
    edges = [0.0, *cuts, 5.4]
    middles = [(before + after) / 2 for before, after in pairwise(edges)]
    # what is on show in the middle of each
    assert [round(10 * float(time)) for time in video.times] == [int(10 * middle + 1e-6) for middle in middles]
    everything = read(path, reader, Sampling(frames=54))
    for frame, time in zip(video.frames, video.times, strict=True):
        assert torch.equal(frame, everything.frames[round(10 * float(time))])


@pytest.mark.parametrize("reader", READERS)
def test_scenes_keep_true_times_where_the_rate_varies(tmp_path: Path, reader: Open) -> None:
    ticks = [40 * place + 2 * place * place for place in range(sum(SCENES))]
    path = written(tmp_path / "a.mp4", ticks)
    video = read(path, reader, Sampling(scenes=0.3))
    edges = [0.0, *by_ffmpeg(path, 0.3), (ticks[-1] + 100) / 1000]
    for time, (before, after) in zip(video.times.tolist(), pairwise(edges), strict=True):
        assert any(abs(time - tick / 1000) < 1e-3 for tick in ticks)
        assert before <= time + 1e-3 and time <= (before + after) / 2 + 1e-3 < after


def test_the_strongest_changes_count_where_there_are_more_scenes_than_frames() -> None:
    starts, scores = np.arange(10.0), np.zeros(10)
    scores[[2, 4, 7, 8]] = 0.5, 0.9, 0.4, 0.2
    assert Sampling(scenes=0.3).chosen(starts, changes=scores) == [1, 3, 5, 8]
    assert Sampling(scenes=0.3, frames=4).chosen(starts, changes=scores) == [1, 3, 5, 8]
    assert Sampling(scenes=0.3, frames=3).chosen(starts, changes=scores) == [1, 3, 7]
    assert Sampling(scenes=0.3, frames=1).chosen(starts, changes=scores) == [5]
    assert Sampling(scenes=0.95).chosen(starts, changes=scores) == [5]
    for count in (0, 1, 2):
        assert Sampling(scenes=0.3).chosen(starts[:count], changes=scores[:count]) == list(range(count))[:1] or count == 2


def test_frames_and_animations_have_scenes_too(tmp_path: Path) -> None:
    frames = film()
    listed = load_video(Frames(frames, fps=10.0), sampling=Sampling(scenes=0.3))
    assert torch.equal(load_video(frames, sampling=Sampling(scenes=0.3)).frames, listed.frames)
    PIL.Image.fromarray(frames[0]).save(
        tmp_path / "a.png", save_all=True, append_images=[PIL.Image.fromarray(frame) for frame in frames[1:]], duration=100
    )
    drawn = load_video(tmp_path / "a.png", sampling=Sampling(scenes=0.3))
    assert torch.equal(drawn.frames, listed.frames) and len(drawn.frames) >= 5
    torch.testing.assert_close(drawn.times, listed.times)
    # with times of their own they are taken as they are (VI-09)
    assert len(load_video(Frames(frames, times=[float(place) for place in range(54)]), sampling=Sampling(scenes=0.3)).frames) == 54


def test_one_frame_at_a_time_is_held() -> None:
    class Picture(np.ndarray[Any, Any]):
        """One that can be watched as it goes."""

    seen = list[weakref.ref[Picture]]()

    def frames() -> Iterator[tuple[float, npt.NDArray[np.uint8]]]:
        for place in range(50):
            picture = np.full((72, 96, 3), place, np.uint8).view(Picture)
            seen.append(weakref.ref(picture))
            yield float(place), picture
            del picture
            assert sum(one() is not None for one in seen) <= 1

    assert changes(frames(), np.arange(50.0)).max() < 0.05


def test_a_frame_that_does_not_come_scores_nothing() -> None:
    black, white = np.zeros((8, 8, 3), np.uint8), np.full((8, 8, 3), 255, np.uint8)
    assert changes([(0.0, black), (0.2, black), (0.3, white), (0.4, white)], np.arange(6) / 10).tolist() == [0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("settings", [{"scenes": 0.0}, {"scenes": 1.0}, {"scenes": float("nan")}, {"scenes": 0.3, "fps": 2.0}])
def test_what_is_no_change_is_said(settings: dict[str, float]) -> None:
    with pytest.raises(InputError, match="sampling"):
        Sampling(**settings)  # type: ignore[arg-type]
