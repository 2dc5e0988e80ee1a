"""One clip from encoded bytes: frames chosen before decoding, read one at a time, with their true times."""

import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from mmsdk.errors import InputError
from mmsdk.vision.intake.arrays import Colour, over, to_pixels
from mmsdk.vision.intake.container import codec_of, container_of
from mmsdk.vision.intake.limits import Limits
from mmsdk.vision.intake.opencv import OpenCVReader
from mmsdk.vision.intake.source import Encoded
from mmsdk.vision.sampling import Sampling
from mmsdk.vision.types import Video

__all__ = ["Reader", "decode_clip", "sampled"]

# Where a stream tells no rate; only the spacing of samples depends on it, times come from the frames.
RATE = 25.0


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
    head = source.head()
    if not container_of(head):
        raise InputError(f"neither a picture nor a clip in a known format (begins with {head[:8]!r})", item=source.name)
    with _on_disk(source) as path:
        reader: Reader = OpenCVReader(path)
        try:
            if not reader.opens:
                raise InputError(_unreadable(head, path, reader), item=source.name)
            return sampled(reader, sampling, limits, background, source.name)
        finally:
            reader.close()


def sampled(reader: Reader, sampling: Sampling, limits: Limits, background: Colour, item: str) -> Video:
    """The frames that `sampling` chooses. Where the header promises more than decodes, it chooses among those that do, with a note."""
    rate = reader.rate if math.isfinite(reader.rate) and reader.rate > 0 else RATE
    count = reader.count
    notes: tuple[str, ...] = ()
    if count == 0:
        count, notes = _walked(reader, limits, item), ("the header tells no number of frames; they were counted",)
    frames = _taken(reader, sampling, count, rate, limits, background, item)
    if len(frames) < sampling.number(count, rate):
        decodable = _walked(reader, limits, item)
        notes = (*notes, f"damaged or cut: {decodable} of {count} promised frames decode")
        frames = _taken(reader, sampling, decodable, rate, limits, background, item)
    if not frames:
        raise InputError("the clip has no frame that decodes", item=item)
    pixels, times = zip(*frames, strict=True)
    if len({frame.shape for frame in pixels}) > 1:
        raise InputError("the size of the picture changes within the clip", item=item)
    return Video(torch.stack(pixels), torch.tensor(times, dtype=torch.float32), item, notes)


def _taken(
    reader: Reader, sampling: Sampling, count: int, rate: float, limits: Limits, background: Colour, item: str
) -> list[tuple[torch.Tensor, float]]:
    if count == 0:
        return []
    limits.check_clip(sampling.number(count, rate), *reader.size, item)
    return [(to_pixels(over(pixels, background)), time) for pixels, time in reader.frames(sampling.indices(count, rate))]


def _walked(reader: Reader, limits: Limits, item: str) -> int:
    count = reader.walk(limits.frames)
    limits.check_walk(count, item)
    return count


@contextmanager
def _on_disk(source: Encoded) -> Iterator[Path]:
    """The clip as a file: bytes go to a temporary one that is removed."""
    if isinstance(source.content, Path):
        yield source.content
        return
    folder = Path(tempfile.mkdtemp(prefix="mmsdk-clip-"))
    try:
        path = folder / "clip"
        path.write_bytes(source.content)
        yield path
    finally:
        shutil.rmtree(folder)


def _unreadable(head: bytes, path: Path, reader: Reader) -> str:
    codec = codec_of(head)
    if codec == "unknown":
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 2**20))
            # a camera writes the header of an MP4 behind the frames
            codec = codec_of(file.read())
    kind = container_of(head)
    if codec == "unknown":
        return f"the clip ({kind}) is truncated or corrupt: its header is missing or cannot be read"
    return f"the clip ({kind}) cannot be decoded: {reader.name} has no decoder for the codec {codec}, or the header is corrupt"
