"""Files of the caller's that do not do as files do: a clip from one is an InputError that names it, by both readers."""

import io
import os
from pathlib import Path
from typing import cast

import jaxtyping
import numpy as np
import PIL.Image
import pytest
import torch

from mmsdk.errors import InputError
from mmsdk.vision.intake import Sampling, load_all, load_video
from mmsdk.vision.intake.access import ACCESS
from mmsdk.vision.intake.limits import LIMITS
from mmsdk.vision.intake.opencv import OpenCVReader
from mmsdk.vision.intake.pyav import PyAVReader
from mmsdk.vision.intake.reader import Open
from mmsdk.vision.intake.source import opened
from mmsdk.vision.intake.video import decode_clip
from mmsdk.vision.types import Image, Video

av = pytest.importorskip("av", reason="clips are written with PyAV, from mmsdk[video]")

READERS = [pytest.param(OpenCVReader.of, id="opencv"), pytest.param(PyAVReader.of, id="pyav")]
NOISE = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def clip() -> bytes:
    """Noise, so that it is read in many parts."""
    file, rng = io.BytesIO(), np.random.default_rng(0)
    with av.open(file, "w", format="mpegts") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 64, 48, "yuv420p", 4_000_000
        for place in range(30):
            frame = av.VideoFrame.from_ndarray(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8), format="rgb24")
            frame.pts = place
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def read(source: object, reader: Open) -> Video:
    with opened(source, LIMITS, ACCESS) as found:
        return decode_clip(found, Sampling(frames=4), LIMITS, (0, 0, 0), reader)


class Breaking(io.BytesIO):
    """A file that gives its head, and then raises."""

    def __init__(self, data: bytes, error: Exception) -> None:
        super().__init__(data)
        self.error, self.reads = error, 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        if self.reads > 1:
            raise self.error
        return super().read(size)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("error", [RuntimeError("gone"), KeyError("gone"), TypeError("gone"), OSError(5, "Input/output error")])
def test_a_clip_whose_file_raises_in_the_middle_names_it(clip: bytes, reader: Open, error: Exception) -> None:
    with pytest.raises(InputError, match=r"^file: cannot be read: .*(gone|Input/output error)"):
        read(Breaking(clip, error), reader)


def test_a_clip_whose_file_raises_leaves_the_batch_alone(clip: bytes) -> None:
    found, other, third = load_all([Breaking(clip, RuntimeError("gone")), NOISE, clip])
    assert isinstance(found, InputError) and str(found) == "item 1 (index 0, file): cannot be read: RuntimeError: gone"
    # the next clip of all that is read by the same library, too
    assert isinstance(other, Image) and isinstance(third, Video)


class Behind(io.RawIOBase):
    """The same, behind Python's own buffer."""

    def __init__(self, data: bytes) -> None:
        self.inner = Breaking(data, RuntimeError("gone"))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self.inner.seek(offset, whence)

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        data = self.inner.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


@pytest.mark.parametrize("reader", READERS)
def test_a_buffer_is_trusted_no_more_than_what_is_behind_it(clip: bytes, reader: Open) -> None:
    with pytest.raises(InputError, match="cannot be read: RuntimeError: gone"):
        read(io.BufferedReader(Behind(clip), 4096), reader)
    # a buffer over bytes has no name
    assert len(read(io.BufferedReader(io.BytesIO(clip)), reader).frames) == 4  # type: ignore[arg-type]  # it works, whatever its type says


class Named(io.BufferedReader):
    """A file whose name is that of another, which is not to be read in its place."""

    def read(self, size: int | None = -1, /) -> bytes:
        raise RuntimeError("closed to you")


@pytest.mark.parametrize("reader", READERS)
def test_a_class_of_the_callers_is_read_through_and_not_by_its_name(clip: bytes, tmp_path: Path, reader: Open) -> None:
    path = tmp_path / "a.ts"
    path.write_bytes(clip)
    with Named(io.FileIO(path)) as file, pytest.raises(InputError, match="closed to you"):
        read(file, reader)
    with path.open("rb") as plain:
        assert torch.equal(read(plain, reader).frames, read(path, reader).frames)


@pytest.mark.parametrize("reader", READERS)
def test_a_name_that_is_no_unicode_is_read_like_any_other(
    clip: bytes, tmp_path: Path, reader: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenCV ends the process where it is given one."""
    odd = tmp_path / os.fsdecode(b"not\xffutf8")
    odd.mkdir()
    path = odd / os.fsdecode(b"\xfe.ts")
    path.write_bytes(clip)
    assert torch.equal(read(path, reader).frames, read(clip, reader).frames)
    monkeypatch.chdir(odd)
    Path("plain.ts").write_bytes(clip)
    with Path("plain.ts").open("rb") as file:
        assert torch.equal(read(file, reader).frames, read("plain.ts", reader).frames)


def test_a_temporary_folder_whose_name_is_no_unicode_is_named(clip: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / os.fsdecode(b"not\xffutf8")
    odd.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(odd))
    with pytest.raises(InputError, match="bytes: cannot be copied to .* set TMPDIR"):
        read(clip, OpenCVReader.of)


class Strange(io.BytesIO):
    """A file one of whose methods gives what no file gives; it is read rightly once, for what it begins with."""

    def __init__(self, data: bytes, method: str, value: object) -> None:
        super().__init__(data)
        self.method, self.value, self.reads = method, value, 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        usual = super().read(size)
        return cast(bytes, self.value) if self.method == "read" and self.reads > 1 else usual

    def tell(self) -> int:
        return cast(int, self.value) if self.method == "tell" else super().tell()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("method", "value", "told"),
    [
        *(("read", value, "gives no bytes") for value in ("text", None, 5, [1], bytearray(9))),
        ("read", bytes(2**22), "gives [0-9,]+ bytes where [0-9,]+ were asked for"),
        *(("tell", value, "tells its place as") for value in (None, "9", -1, 2.5, 2**70)),
    ],
    ids=lambda value: f"{value!r:.12}",
)
def test_a_file_that_gives_what_no_file_gives_is_named(
    clip: bytes, reader: Open, method: str, value: object, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # without the check of types at every call, as users run it
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(InputError, match=f"^file: {told}"):
        read(Strange(clip, method, value), reader)


class Drip:
    """A stream that cannot go back, and gives a little at a time, as a socket does."""

    def __init__(self, data: bytes) -> None:
        self.file = io.BytesIO(data)

    def read(self, size: int = -1, /) -> bytes:
        return self.file.read(min(size, 100) if size >= 0 else 100)


def test_what_comes_in_small_parts_is_read_to_its_end(clip: bytes) -> None:
    file = io.BytesIO()
    PIL.Image.fromarray(NOISE).save(file, "PNG")
    (picture,) = load_all([Drip(file.getvalue())])
    assert isinstance(picture, Image) and (picture.pixels.permute(1, 2, 0).numpy() == NOISE).all()
    assert torch.equal(load_video(Drip(clip)).frames, load_video(clip).frames)


def test_a_full_disk_is_named(clip: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(InputError, match=r"temporary file for OpenCV: No such file.*mmsdk\[video\]"):
        read(clip, OpenCVReader.of)
    assert len(read(clip, PyAVReader.of).frames) == 4
