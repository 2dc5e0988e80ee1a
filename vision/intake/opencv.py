"""Clips by OpenCV's FFmpeg, which every installation has."""

import math
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

from mmsdk.errors import InputError
from mmsdk.vision.intake.codec import unreadable
from mmsdk.vision.intake.limits import Limits
from mmsdk.vision.intake.reader import RATE, SAME
from mmsdk.vision.intake.source import Encoded

__all__ = ["OpenCVReader"]

# A rate above this is a mistake of the header.
FASTEST = 1000.0
PART = 2**20
# Pixel formats with alpha, which OpenCV drops: it would show what lies under transparent places.
ALPHA_MODE = b"\x53\xc0\x81\x01"
ALPHA = {b"ARGB", b"RGBA", b"ABGR", b"BGRA", b"Y42A", b"Y4\x0b\x08", b"Y4\x0a\x08"}


class OpenCVReader:
    """A clip, read twice: once for the time of every frame, without decoding; once for the frames that are wanted.

    OpenCV cannot seek exactly, so that everything up to the last wanted frame is decoded. Raises InputError for what it cannot open.
    """

    def __init__(self, path: Path, source: Encoded, limits: Limits) -> None:
        self._path, self._kind, self._item, self._limits = path, source.kind, source.item, limits
        with self._capture() as capture:
            rate = float(capture.get(cv2.CAP_PROP_FPS))
            self._rate = rate if math.isfinite(rate) and 0 < rate <= FASTEST else RATE
            self._promised = float(capture.get(cv2.CAP_PROP_FRAME_COUNT))
            self.size = int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT)), int(capture.get(cv2.CAP_PROP_FRAME_WIDTH))
            if _letters(capture.get(cv2.CAP_PROP_CODEC_PIXEL_FORMAT)) in ALPHA or self._head_tells_alpha():
                told = "the clip is partly transparent, which OpenCV cannot read, and PyAV can"
                raise InputError(f"{told}; install mmsdk[video] (pip install '.[video]' in the clone)", item=self._item)
        self._timed = True
        self.cut = False

    @classmethod
    @contextmanager
    def of(cls, source: Encoded, limits: Limits) -> Iterator["OpenCVReader"]:
        """The reader of a source, for the time of a `with`."""
        with _on_disk(source) as path:
            yield cls(path, source, limits)

    def starts(self) -> npt.NDArray[np.float64]:
        """The second at which each frame is shown, rising from 0. `cut` then tells whether the file ends before its last frame."""
        times: list[float] = []
        with self._capture() as capture:
            # packets as they are, without decoding them
            capture.set(cv2.CAP_PROP_FORMAT, -1)
            while capture.grab():
                times.append(float(capture.get(cv2.CAP_PROP_POS_MSEC)) / 1000)
                self._limits.check_frames(len(times), self._item)
        # these two count frames one by one; the frame that the file breaks off in is there, but not whole
        self.cut = self._kind.name in {"MP4", "AVI"} and 0 < len(times) < self._promised
        if self.cut:
            times.pop()
        starts = np.unique(np.asarray(times, np.float64))
        self._timed = len(starts) == len(times)
        return starts - starts[:1] if self._timed else np.arange(len(times)) / self._rate

    def frames(self, starts: Sequence[float]) -> Iterator[tuple[float, npt.NDArray[np.uint8]]]:
        """The frames (h w 3) shown at these rising times; in place of one that does not decode, the next that does, if any."""
        wanted = deque(starts)
        with self._capture() as capture:
            first, count = 0.0, 0
            while wanted and capture.grab():
                time = float(capture.get(cv2.CAP_PROP_POS_MSEC)) / 1000 if self._timed else count / self._rate
                first, count = (first if count else time), count + 1
                if time - first < wanted[0] - SAME:
                    continue
                good, pixels = capture.retrieve()
                if not good:
                    continue
                while wanted and wanted[0] <= time - first + SAME:
                    wanted.popleft()
                yield time - first, np.asarray(pixels[..., ::-1], np.uint8)

    def _head_tells_alpha(self) -> bool:
        """Whether a WebM says that its frames have alpha beside them, where FFmpeg's decoders do not look."""
        with self._path.open("rb") as file:
            return self._kind.name == "Matroska" and ALPHA_MODE in file.read(2**16)

    @contextmanager
    def _capture(self) -> Iterator[cv2.VideoCapture]:
        # the backend is named, or a path with a percent sign would be taken for a numbered series of pictures
        capture = cv2.VideoCapture(str(self._path.absolute()), cv2.CAP_FFMPEG)
        try:
            if not capture.isOpened():
                with self._path.open("rb") as file:
                    raise InputError(unreadable(self._kind.name, file), item=self._item)
            yield capture
        finally:
            capture.release()


@contextmanager
def _on_disk(source: Encoded) -> Iterator[Path]:
    """The clip as a file: one that is such is read in place where its name is Unicode (any other ends the process, too), all else goes to
    a temporary one that is removed.

    OpenCV can also read from a Python object, but lets go of it without holding the interpreter's lock (5.0.0), which ends the process.
    """
    if source.path and _is_unicode(Path(source.path)):
        yield Path(source.path)
        return
    try:
        # a folder, because an open temporary file cannot be opened again on every system
        folder = tempfile.TemporaryDirectory(prefix="mmsdk-clip-")
    except OSError as error:
        raise _unwritten(error, source.item) from None
    with folder as name:
        path = Path(name) / "clip"
        if not _is_unicode(path):
            raise InputError(f"cannot be copied to {name!r} for OpenCV, which takes only Unicode names; set TMPDIR", item=source.item)
        _copy(source, path)
        yield path


def _is_unicode(path: Path) -> bool:
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        return False
    return True


def _copy(source: Encoded, path: Path) -> None:
    source.stream.seek(0)
    left = source.size
    try:
        with path.open("wb") as file:
            # no further than the clip said that it goes: not every stream ends
            while left > 0 and (part := source.stream.read(min(left, PART))):
                left -= file.write(part)
    except OSError as error:
        raise _unwritten(error, source.item) from None


def _unwritten(error: OSError, item: str) -> InputError:
    return InputError(f"cannot be copied to a temporary file for OpenCV: {error.strerror or error}; mmsdk[video] needs none", item=item)


def _letters(code: float) -> bytes:
    return (int(code) & 0xFFFFFFFF).to_bytes(4, "little") if math.isfinite(code) else b""
