"""Clips by both readers: real codecs and containers, written here, read by PyAV and by OpenCV, and compared with what was written."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from mmsdk.errors import InputError
from mmsdk.vision.intake import Limits, Sampling, load_video
from mmsdk.vision.intake.access import ACCESS
from mmsdk.vision.intake.limits import LIMITS
from mmsdk.vision.intake.opencv import OpenCVReader
from mmsdk.vision.intake.pyav import PyAVReader
from mmsdk.vision.intake.reader import Open
from mmsdk.vision.intake.source import EncodedSource, opened
from mmsdk.vision.intake.video import decode_clip
from mmsdk.vision.types import Video

av = pytest.importorskip("av", reason="clips are written with PyAV, from mmsdk[video]")

READERS = [pytest.param(OpenCVReader.of, id="opencv"), pytest.param(PyAVReader.of, id="pyav")]
WHITE = (255, 255, 255)
STEP = 5
PLAIN = {
    "a.mp4": "libx264",
    "a.mkv": "libx264",
    "a.ts": "libx264",
    "a.webm": "libvpx-vp9",
    "a.avi": "mpeg4",
    "a.mov": "mpeg4",
    "a.flv": "libx264",
}


def written(
    path: Path,
    count: int,
    codec: str = "libx264",
    size: tuple[int, int] = (64, 48),
    pixels: str = "yuv420p",
    ticks: list[int] | None = None,
    options: dict[str, str] | None = None,
) -> Path:
    """A clip whose frame i has the grey level STEP i (below 256), at 10 frames a second, or at `ticks` milliseconds."""
    base = Fraction(1, 1000) if ticks else Fraction(1, 10)
    with av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = *size, pixels
        stream.bit_rate = 4_000_000
        stream.codec_context.gop_size, stream.codec_context.time_base = 12, base
        for place in range(count):
            level = np.full((size[1], size[0], 3), STEP * place % 256, np.uint8)
            frame = av.VideoFrame.from_ndarray(level, format="rgb24").reformat(format=pixels)
            frame.pts, frame.time_base = (ticks[place] if ticks else place), base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@contextmanager
def as_urgent_as_before() -> Iterator[None]:
    """SVT-AV1, run by root, makes its caller a real-time thread of the highest priority, and so whatever that starts from then on."""
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, priority)


def read(source: EncodedSource, reader: Open, sampling: Sampling, limits: Limits = LIMITS) -> Video:
    with opened(source, limits, ACCESS) as found:
        return decode_clip(found, sampling, limits, WHITE, reader)


def levels(video: Video) -> list[int]:
    return (video.frames.float().mean(dim=(1, 2, 3)) / STEP).round().int().tolist()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", PLAIN)
def test_vi_04_every_container_gives_the_same_frames_at_their_times(tmp_path: Path, name: str, reader: Open) -> None:
    path = written(tmp_path / name, 50, PLAIN[name])
    video = read(path, reader, Sampling(frames=5))
    assert levels(video) == [5, 15, 25, 35, 45]
    assert video.times.tolist() == pytest.approx([0.5, 1.5, 2.5, 3.5, 4.5], abs=2e-3)
    assert video.notes == ()


@pytest.mark.parametrize("name", PLAIN)
def test_both_readers_give_the_same_bytes(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, 40, PLAIN[name])
    for sampling in (Sampling(frames=3), Sampling(fps=2.5), Sampling(frames=1000)):
        one, other = (read(path, reader, sampling) for reader in (OpenCVReader.of, PyAVReader.of))
        assert torch.equal(one.frames, other.frames)
        assert one.times.tolist() == pytest.approx(other.times.tolist(), abs=1e-3)


@pytest.mark.parametrize("reader", READERS)
def test_a_path_bytes_and_a_file_are_the_same_clip(tmp_path: Path, reader: Open) -> None:
    path = written(tmp_path / "50%02d.mp4", 20)
    named = read(path, reader, Sampling(frames=4))
    with path.open("rb") as file:
        file.seek(7)
        for source in (path.read_bytes(), io.BytesIO(path.read_bytes()), file):
            assert torch.equal(read(source, reader, Sampling(frames=4)).frames, named.frames)
        assert file.tell() == 7 and not file.closed


@pytest.mark.parametrize("reader", READERS)
def test_times_are_true_where_the_rate_varies(tmp_path: Path, reader: Open) -> None:
    ticks = [20 * place + 3 * place * place for place in range(50)]
    video = read(written(tmp_path / "a.mp4", 50, ticks=ticks), reader, Sampling(frames=1000))
    assert levels(video) == list(range(50))
    assert video.times.tolist() == pytest.approx([tick / 1000 for tick in ticks], abs=1e-3)


@pytest.mark.parametrize("reader", READERS)
def test_a_chosen_frame_is_the_one_that_reading_everything_gives(tmp_path: Path, reader: Open) -> None:
    path = written(tmp_path / "a.mp4", 50)
    everything = read(path, reader, Sampling(frames=50))
    for frames in (1, 2, 7, 13):
        video = read(path, reader, Sampling(frames=frames))
        places = [int(torch.argmin((everything.times - time).abs())) for time in video.times]
        assert torch.equal(video.frames, everything.frames[places])


def uncounted(data: bytes) -> bytes:
    """A clip whose header says that it has no frames: the fields of an AVI and of an IVF, where these are what it is."""
    for chunk, offset in ((b"avih", 16), (b"strh", 32), (b"dmlh", 0)):
        if data[:4] == b"RIFF" and chunk in data:
            at = data.index(chunk) + 8 + offset
            data = data[:at] + bytes(4) + data[at + 4 :]
    return data[:24] + bytes(4) + data[28:] if data[:4] == b"DKIF" else data


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("a.asf", "msmpeg4", {}),
        ("a.h264", "libx264", {}),
        ("a.avi", "mpeg4", {}),
        ("a.ivf", "libvpx-vp9", {}),
        ("a.mkv", "libx264", {"live": "1"}),
        ("a.mp4", "libx264", {"movflags": "frag_keyframe+empty_moov"}),
    ],
    ids=["asf", "raw", "avi", "ivf", "live", "fragments"],
)
def test_vi_05_a_clip_whose_header_tells_no_number_of_frames_is_counted(
    tmp_path: Path, name: str, codec: str, options: dict[str, str], reader: Open
) -> None:
    data = uncounted(written(tmp_path / name, 50, codec, options=options).read_bytes())
    with av.open(io.BytesIO(data)) as container:
        assert container.streams.video[0].frames == 0
    video = read(data, reader, Sampling(frames=5))
    assert np.abs(np.asarray(levels(video)) - [5, 15, 25, 35, 45]).max() <= 1
    assert (video.times.diff() > 0).all() and video.notes == ()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("count", [1, 2])
def test_vi_02_one_and_two_frames(tmp_path: Path, count: int, reader: Open) -> None:
    video = read(written(tmp_path / "a.mp4", count), reader, Sampling(frames=8))
    assert levels(video) == list(range(count)) and video.times[0] == 0


@pytest.mark.parametrize("reader", READERS)
def test_vi_01_a_clip_without_a_frame(tmp_path: Path, reader: Open) -> None:
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(InputError, match=r"sound\.mp4"):
        read(tmp_path / "sound.mp4", reader, Sampling(frames=8))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("name", "codec", "known", "unknown"),
    [
        ("a.mp4", "libx264", b"avc1", b"zzz1"),
        ("a.avi", "mpeg4", b"FMP4", b"ZZZ3"),
        ("a.mkv", "libx264", b"V_MPEG4/ISO/AVC", b"V_ZZZZ4/ISO/AVC"),
        ("a.ivf", "libvpx-vp9", b"VP90", b"ZZ90"),
        ("a.asf", "msmpeg4", b"MP43", b"ZZ43"),
    ],
)
def test_vi_06_a_codec_without_decoder_is_named_and_the_next_clip_works(
    tmp_path: Path, name: str, codec: str, known: bytes, unknown: bytes, reader: Open
) -> None:
    data = written(tmp_path / name, 10, codec).read_bytes()
    assert known in data
    with pytest.raises(InputError, match=unknown.decode()):
        read(data.replace(known, unknown), reader, Sampling(frames=2))
    assert levels(read(data, reader, Sampling(frames=2))) == [2, 7]


def test_vi_06_opencv_names_a_codec_that_it_lacks(tmp_path: Path) -> None:
    with as_urgent_as_before():
        path = written(tmp_path / "a.mp4", 10, "libsvtav1", size=(64, 64))
    assert levels(read(path, PyAVReader.of, Sampling(frames=2))) == [2, 7]
    # OpenCV's wheels come without a software decoder of AV1
    with pytest.raises(InputError, match="not one frame decodes.*av01"):
        read(path, OpenCVReader.of, Sampling(frames=2))
    assert levels(read(written(tmp_path / "b.mp4", 10), OpenCVReader.of, Sampling(frames=2))) == [2, 7]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["a.ts", "a.mkv", "a.avi", "a.flv"])
def test_vi_13_a_clip_that_is_cut_gives_the_frames_before_the_cut(tmp_path: Path, name: str, reader: Open) -> None:
    data = written(tmp_path / name, 50, PLAIN[name]).read_bytes()
    video = read(data[: len(data) * 7 // 10], reader, Sampling(frames=100))
    # every frame once, in order and at its own time, none past the cut, and no grey in place of what is missing
    assert levels(video) == (video.times * 10).round().int().tolist()
    assert (video.times.diff() > 0).all() and 20 < len(video.frames) < 50


@pytest.mark.parametrize("reader", READERS)
def test_vi_13_a_header_before_the_cut_promises_more_and_is_not_believed(tmp_path: Path, reader: Open) -> None:
    with av.open(str(tmp_path / "a.mp4"), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        noise = np.random.default_rng(0)
        for place in range(30):
            frame = av.VideoFrame.from_ndarray(noise.integers(0, 256, (48, 64, 3), dtype=np.uint8), format="rgb24")
            frame.pts = place
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    data = (tmp_path / "a.mp4").read_bytes()
    whole = read(data, reader, Sampling(frames=30))
    video = read(data[: len(data) * 7 // 10], reader, Sampling(frames=30))
    assert 10 < len(video.frames) < 30 and "cut short" in video.notes[0]
    same = [torch.equal(frame, whole.frames[round(float(time) * 10)]) for frame, time in zip(video.frames, video.times, strict=True)]
    assert all(same)


@pytest.mark.parametrize("reader", READERS)
def test_vi_13_a_header_behind_the_cut_is_an_error(tmp_path: Path, reader: Open) -> None:
    data = written(tmp_path / "a.mp4", 50).read_bytes()
    with pytest.raises(InputError, match="MP4"):
        read(data[: len(data) * 7 // 10], reader, Sampling(frames=8))


@pytest.mark.parametrize("reader", READERS)
def test_vi_14_odd_sizes_are_kept(tmp_path: Path, reader: Open) -> None:
    path = written(tmp_path / "a.mp4", 3, size=(639, 359), pixels="yuv444p")
    assert read(path, reader, Sampling(frames=2)).size == (359, 639)


@pytest.mark.parametrize(
    ("codec", "pixels", "name"), [("qtrle", "argb", "a.mov"), ("png", "rgba", "b.mov"), ("libvpx-vp9", "yuva420p", "a.webm")]
)
def test_vi_14_alpha_is_laid_over_the_background(tmp_path: Path, codec: str, pixels: str, name: str) -> None:
    with av.open(str(tmp_path / name), "w") as container:
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, pixels
        if pixels == "yuva420p":
            stream.metadata["alpha_mode"] = "1"
        rgba = np.zeros((48, 64, 4), np.uint8)
        rgba[..., 0], rgba[:, 32:, 3] = 255, 255
        for place in range(3):
            frame = av.VideoFrame.from_ndarray(rgba, format="rgba").reformat(format=pixels)
            frame.pts = place
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with opened(tmp_path / name, LIMITS, ACCESS) as found:
        video = decode_clip(found, Sampling(frames=1), LIMITS, (0, 0, 255), PyAVReader.of)
    left, right = video.frames[0, :, 10, 10].int(), video.frames[0, :, 10, 50].int()
    assert (left - torch.tensor([0, 0, 255])).abs().max() <= 3 and (right - torch.tensor([255, 0, 0])).abs().max() <= 3


def test_vi_14_opencv_refuses_alpha_rather_than_show_what_lies_under_it(tmp_path: Path) -> None:
    for path in (written(tmp_path / "a.mov", 3, "qtrle", pixels="argb"), written(tmp_path / "a.webm", 3, "libvpx-vp9", pixels="yuva420p")):
        with pytest.raises(InputError, match=r"partly transparent.*mmsdk\[video\]"):
            read(path, OpenCVReader.of, Sampling(frames=1))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("turn", "matrix"), [(1, (0, 1, -1, 0)), (2, (-1, 0, 0, -1)), (3, (0, -1, 1, 0))])
def test_a_clip_that_was_filmed_on_its_side_is_turned_upright(
    tmp_path: Path, turn: int, matrix: tuple[int, int, int, int], reader: Open
) -> None:
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        ramp = np.broadcast_to(np.linspace(0, 255, 64).astype(np.uint8)[None, :, None], (48, 64, 3)).copy()
        frame = av.VideoFrame.from_ndarray(ramp, format="rgb24")
        frame.pts = 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    data = (tmp_path / "a.mp4").read_bytes()
    at = data.index(b"\0\1\0\0" + bytes(12) + b"\0\1\0\0", data.index(b"tkhd"))
    a, b, c, d = (int(65536 * entry).to_bytes(4, "big", signed=True) for entry in matrix)
    turned = data[:at] + a + b + bytes(4) + c + d + bytes(4) + data[at + 24 :]
    upright = read(data, reader, Sampling(frames=1)).frames[0]
    # a quarter turn of the matrix is one clockwise
    assert torch.equal(read(turned, reader, Sampling(frames=1)).frames[0], torch.rot90(upright, -turn, (1, 2)))


@pytest.mark.parametrize("reader", READERS)
def test_limits_are_checked_before_decoding(tmp_path: Path, reader: Open) -> None:
    path = written(tmp_path / "a.mp4", 30)
    with pytest.raises(InputError, match=r"more than 20 frames \(Limits\.frames\)"):
        read(path, reader, Sampling(frames=2), Limits(frames=20))
    with pytest.raises(InputError, match=r"64x48 is 3,072 pixels"):
        read(path, reader, Sampling(frames=2), Limits(pixels=3071))


@pytest.mark.parametrize("reader", READERS)
def test_vi_10_frames_are_shrunk_while_they_are_read_where_limits_say_so(tmp_path: Path, reader: Open) -> None:
    path = written(tmp_path / "a.mp4", 40)
    video = read(path, reader, Sampling(frames=10), Limits(clip_pixels=10 * 32 * 24))
    assert video.size == (24, 32) and levels(video) == list(range(2, 40, 4)) and "shrunk" in video.notes[0]


@pytest.mark.parametrize(
    "content",
    [
        b"#EXTM3U\n#EXT-X-VERSION:3\n#EXTINF:1,\nhttp://127.0.0.1/a.ts\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" profiles="urn:mpeg:dash:profile:isoff-live:2011"></MPD>',
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    ],
)
def test_lists_that_would_open_other_files_are_never_given_to_a_decoder(content: bytes) -> None:
    with pytest.raises(InputError, match=r"not a clip|not pixels|PostScript"):
        load_video(content)


@pytest.fixture
def damaged(tmp_path: Path) -> bytes:
    data = bytearray(written(tmp_path / "a.ts", 50).read_bytes())
    rng = np.random.default_rng(0)
    for place in rng.integers(len(data) // 3, len(data) // 2, 200):
        data[place] ^= 0xFF
    return bytes(data)


@pytest.mark.parametrize("reader", READERS)
def test_vi_13_damage_in_the_middle_never_repeats_a_frame(damaged: bytes, reader: Open) -> None:
    video = read(damaged, reader, Sampling(frames=50))
    assert (video.times.diff() > 0).all() and len(video.frames) <= 50
