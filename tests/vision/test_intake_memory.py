"""What intake costs at worst, measured in a process of its own: headers that promise too much, endless animations, a clip of two hours."""

import io
import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

av = pytest.importorskip("av", reason="the long clip is written with PyAV, from mmsdk[video]")

SIDE = 60_000
MEASURE = """
import json, sys, torch
from contextlib import suppress
from pathlib import Path
from mmsdk.errors import InputError
from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.intake import Sampling, load, load_image, load_video
from mmsdk.vision.intake.access import ACCESS
from mmsdk.vision.intake.limits import LIMITS
from mmsdk.vision.intake.opencv import OpenCVReader
from mmsdk.vision.intake.pyav import PyAVReader
from mmsdk.vision.intake.source import opened
from mmsdk.vision.intake.video import decode_clip
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.vit import ViT, ViTConfig

def megabytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024

def measured(job):
    # forget the peak so far; where that is not allowed, the bound only becomes stricter
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = megabytes("VmRSS")
    try:
        told = job()
    except InputError as error:
        told = str(error)
    return {"told": told, "grown": megabytes("VmHWM") - before}

def long_clip(path, reader):
    torch.manual_seed(0)
    encoder = Encoder(Dinov2(ViT(ViTConfig(width=48, layers=1, heads=3, hidden=48)).eval()), Preprocess())
    size, budget = (360, 640), 4096
    frames = 2 * (budget // encoder.count(size, 2))
    with opened(path, LIMITS, ACCESS) as found:
        video = decode_clip(found, Sampling(fps=1.0, frames=frames), LIMITS, (255, 255, 255), reader)
    (tokens,) = encoder([video])
    return {"planned": encoder.count(size, frames), "tokens": len(tokens), "frames": len(video.frames), "last": float(video.times[-1])}

folder = Path(sys.argv[1])
load(folder / "small.png"), load_image(folder / "small.gif"), load_video(folder / "small.mp4")
jobs = {path.name: lambda path=path: str(load(path)) for path in sorted(folder.glob("bomb.*"))}
jobs["first of many"] = lambda: load_image(folder / "many.gif").notes[0]
jobs["many"] = lambda: str(load_video(folder / "many.gif"))
jobs["pyav"] = lambda: long_clip(folder / "long.mp4", PyAVReader.of)
jobs["opencv"] = lambda: long_clip(folder / "long.mp4", OpenCVReader.of)
print(json.dumps({name: measured(job) for name, job in jobs.items()}))
"""


def saved(kind: str, **settings: object) -> bytearray:
    file = io.BytesIO()
    frames = [PIL.Image.fromarray(np.full((8, 8, 3), level, np.uint8)) for level in (0, 255)]
    frames[0].save(file, kind, **settings, **({"append_images": frames[1:]} if "save_all" in settings else {}))
    return bytearray(file.getvalue())


def patched(data: bytearray, at: int, layout: str, *values: int) -> bytes:
    struct.pack_into(layout, data, at, *values)
    return bytes(data)


def png() -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    body = chunk(b"IDAT", zlib.compress(bytes(10_000_000), 9))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)) + body + chunk(b"IEND", b"")


def tiff() -> bytes:
    tags = {256: SIDE, 257: SIDE, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: SIDE, 279: 100}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(100)


def jpeg() -> bytes:
    data = saved("JPEG")
    return patched(data, data.index(b"\xff\xc0") + 5, ">HH", SIDE, SIDE)


def webp_extended() -> bytes:
    return patched(saved("WEBP", save_all=True, duration=100), 24, "<HBHB", SIDE - 1 & 0xFFFF, SIDE >> 16, SIDE - 1 & 0xFFFF, SIDE >> 16)


BOMBS: dict[str, Callable[[], bytes]] = {
    "png": png,
    "jpg": jpeg,
    "gif": lambda: patched(saved("GIF"), 6, "<HH", SIDE, SIDE),
    "bmp": lambda: patched(saved("BMP"), 18, "<ii", SIDE, SIDE),
    "tif": tiff,
    "ppm": lambda: b"P6\n60000 60000\n255\n" + bytes(1000),
    "webp": webp_extended,
    # these two have 14 bits for a side
    "lossless.webp": lambda: patched(saved("WEBP", lossless=True), 21, "<I", 12_999 | 12_999 << 14),
    "lossy.webp": lambda: patched(saved("WEBP"), 26, "<HH", 13_000, 13_000),
    "y4m": lambda: b"YUV4MPEG2 W60000 H60000 F10:1 Ip A1:1 C420\nFRAME\n" + bytes(10_000),
}


def many() -> bytes:
    """A hundred thousand frames of one pixel."""
    frame = b"\x21\xf9\x04\x00\x0a\x00\x00\x00" + b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(3) + b"\xff\xff\xff" + 100_000 * frame + b";"


def film(path: Path, turns: int) -> None:
    """Twenty-four frames, one a second, encoded once and put one after the other: 300 turns are two hours."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=1, options={"preset": "ultrafast", "tune": "zerolatency"})
        stream.width, stream.height, stream.pix_fmt, stream.codec_context.gop_size = 640, 360, "yuv420p", 24
        packets = []
        for place in range(24):
            frame = av.VideoFrame.from_ndarray(np.full((360, 640, 3), 10 * place, np.uint8), format="rgb24")
            frame.pts = place
            packets += stream.encode(frame)
        packets += stream.encode()
        scenes = [(bytes(p), p.pts, p.dts, p.is_keyframe, p.time_base) for p in packets if p.size]
        for turn in range(turns):
            for content, pts, dts, key, base in scenes:
                packet = av.Packet(content)
                packet.stream, packet.time_base, packet.is_keyframe = stream, base, key
                packet.pts, packet.dts = pts + round(24 * turn / base), dts + round(24 * turn / base)
                container.mux(packet)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    if not Path("/proc/self/status").exists():
        pytest.skip("reads the resident size from /proc")
    folder = tmp_path_factory.mktemp("bombs")
    for name, made in BOMBS.items():
        (folder / f"bomb.{name}").write_bytes(made())
    (folder / "many.gif").write_bytes(many())
    (folder / "small.png").write_bytes(saved("PNG"))
    (folder / "small.gif").write_bytes(saved("GIF"))
    film(folder / "small.mp4", 1)
    film(folder / "long.mp4", 300)
    done = subprocess.run([sys.executable, "-c", MEASURE, str(folder)], capture_output=True, text=True, check=True)
    found: dict[str, dict] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kind", BOMBS)
def test_in_14_a_bomb_of_any_format_is_refused_before_memory_is_set_aside(measured: dict[str, dict], kind: str) -> None:
    bomb = measured[f"bomb.{kind}"]
    side = 13_000 if "los" in kind else SIDE
    told = f"{side}x{side} is {side * side:,} pixels, but at most 100,000,000 are decoded (Limits.pixels)"
    # FFmpeg refuses such a frame by itself, without saying so
    assert ("bomb.y4m: the clip" if kind == "y4m" else told) in bomb["told"]
    assert bomb["grown"] < 50


def test_in_15_a_hundred_thousand_frames_stop_at_the_limit_in_little_memory(measured: dict[str, dict]) -> None:
    assert "more than 20,000 frames (Limits.drawn_frames)" in measured["many"]["told"] and measured["many"]["grown"] < 50
    assert "first of several frames" in measured["first of many"]["told"] and measured["first of many"]["grown"] < 50


@pytest.mark.parametrize("reader", ["pyav", "opencv"])
def test_vi_10_two_hours_meet_their_budget_as_planned_in_little_memory(measured: dict[str, dict], reader: str) -> None:
    told = measured[reader]["told"]
    assert told["tokens"] == told["planned"] <= 4096 and told["frames"] > 50
    # spread over all of it
    assert told["last"] > 7200 * (1 - 1 / told["frames"])
    # all frames together would be 5 GB; those that are kept are 43 MB, and once more as the encoder's input
    assert measured[reader]["grown"] < 400
