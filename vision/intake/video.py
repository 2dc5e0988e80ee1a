"""One clip from encoded bytes: frames chosen before decoding, read one at a time, with their true times."""

import io
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from mmsdk.errors import InputError
from mmsdk.vision.intake.arrays import Colour, over, shrinking, shrunk, to_pixels
from mmsdk.vision.intake.codec import codec_of
from mmsdk.vision.intake.kinds import Kind
from mmsdk.vision.intake.limits import Limits
from mmsdk.vision.intake.opencv import OpenCVReader
from mmsdk.vision.intake.source import Encoded
from mmsdk.vision.sampling import Sampling
from mmsdk.vision.types import Video

__all__ = ["Reader", "decode_clip", "sampled"]

# Where a stream tells no rate; only the spacing of samples depends on it, times come from the frames.
RATE = 25.0


@runtime_checkable
class Reader(Protocol):
    """A clip that can be stepped through."""

    name: str
    opens: bool
    count: int
    rate: float
    size: tuple[int, int]

    def frames(self, wanted: Sequence[int]) -> Iterator[tuple[npt.NDArray[np.uint8], float]]:
        """The frames of these rising indices, up to the end or the first damage."""
        ...

    def walk(self, most: int) -> int:
        """How many frames decode, counted up to `most` + 1."""
        ...

    def rewind(self) -> None:
        """Back to before the first frame."""
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...


def decode_clip(source: Encoded, sampling: Sampling, limits: Limits, background: Colour) -> Video:
    """Sample a clip. Raises InputError for what is no clip, has no decoder (the codec is named), no frame, or is too large."""
    with _on_disk(source) as path:
        reader: Reader = OpenCVReader(path)
        try:
            if not reader.opens:
                raise InputError(_unreadable(source.kind, path, reader), item=source.item)
            return sampled(reader, sampling, limits, background, source.item)
        finally:
            reader.close()


def sampled(reader: Reader, sampling: Sampling, limits: Limits, background: Colour, item: str) -> Video:
    """The frames that `sampling` chooses. Where the header promises more than decodes, it chooses among those that do, with a note."""
    rate = reader.rate if math.isfinite(reader.rate) and reader.rate > 0 else RATE
    count = reader.count
    notes: tuple[str, ...] = ()
    if count == 0:
        count, notes = _walked(reader, limits, item), ("the header tells no number of frames; they were counted",)
    scale = _scale(reader, sampling.number(count, rate), limits, item)
    frames = _taken(reader, sampling.indices(count, rate), scale, background)
    if len(frames) < sampling.number(count, rate):
        decodable = _walked(reader, limits, item)
        notes = (*notes, f"damaged or cut: {decodable} of {count} promised frames decode")
        frames = _taken(reader, sampling.indices(decodable, rate), scale, background)
    if not frames:
        raise InputError("the clip has no frame that decodes", item=item)
    pixels, times = zip(*frames, strict=True)
    if len({frame.shape for frame in pixels}) > 1:
        raise InputError("the size of the picture changes within the clip", item=item)
    return Video(torch.stack(pixels), torch.tensor(times, dtype=torch.float32), item, notes + shrinking(scale))


def _scale(reader: Reader, number: int, limits: Limits, item: str) -> float:
    """How much frames shrink, told by the header; a header without a size, or a clip without a frame, fails later and by name."""
    height, width = reader.size
    if number == 0 or height * width == 0:
        return 1.0
    limits.check_size(height, width, item)
    limits.check_frames(number, item)
    return limits.scale(number, height, width)


def _taken(reader: Reader, wanted: Sequence[int], scale: float, background: Colour) -> list[tuple[torch.Tensor, float]]:
    return [(to_pixels(shrunk(over(pixels, background), scale)), time) for pixels, time in reader.frames(wanted)]


def _walked(reader: Reader, limits: Limits, item: str) -> int:
    count = reader.walk(limits.frames)
    if count:
        limits.check_frames(count, item)
    return count


@contextmanager
def _on_disk(source: Encoded) -> Iterator[Path]:
    """The clip as a file: one that is open as such is read in place, all else goes to a temporary one that is removed."""
    name = source.stream.name if isinstance(source.stream, io.BufferedReader) else ""
    if isinstance(name, str) and os.path.isfile(name) and os.path.samestat(os.stat(name), os.fstat(source.stream.fileno())):
        yield Path(name)
        return
    # a folder, because an open temporary file cannot be opened again on every system
    with tempfile.TemporaryDirectory(prefix="mmsdk-clip-") as folder:
        path = Path(folder) / "clip"
        with path.open("wb") as file:
            shutil.copyfileobj(source.stream, file)
        yield path


def _unreadable(kind: Kind, path: Path, reader: Reader) -> str:
    codec = codec_of(path)
    if codec == "unknown":
        return f"the clip ({kind.name}) is truncated or corrupt: its header is missing or cannot be read"
    return f"the clip ({kind.name}) cannot be decoded: {reader.name} has no decoder for the codec {codec}, or the header is corrupt"
