"""Clips as files: a film (.mp4), an animation (.gif), or a sheet of all frames (.png), there as a whole or not at all."""

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import cv2
import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vision.types import Video

__all__ = ["animated", "check_film", "save_film", "sheet"]

_LEAST = 256  # rows that a film has: a smaller clip is shown larger, each pixel as a square
_GAP, _LINE = 2, 14


def check_film(path: Path) -> None:
    """Raises InputError where a clip cannot be written there: another ending, a folder that is not, a file that cannot be made."""
    if path.suffix.lower() not in _WRITERS:
        raise InputError(f"a clip is written as one of {', '.join(_WRITERS)}", item=str(path))
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise InputError("it cannot be written there", item=str(path))


def save_film(video: Video, path: Path) -> None:
    """Write the clip; what was there before stays till it is done. Raises InputError as `check_film` does, and where nothing encodes it."""
    check_film(path)
    # the ending tells the writers what to write
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        _WRITERS[path.suffix.lower()](video, part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def animated(video: Video) -> bytes:
    """The clip as an animation, .gif, without end."""
    file = io.BytesIO()
    _gif(video, file)
    return file.getvalue()


def sheet(clips: Sequence[UInt8[Tensor, "t 3 h w"]], texts: Sequence[str], path: Path) -> None:
    """A row of frames for each clip, with its text above, as a picture."""
    rows = [np.concatenate([np.pad(frame, ((0, _GAP), (0, _GAP), (0, 0))) for frame in _frames(clip, 1)], 1) for clip in clips]
    height, width = rows[0].shape[:2]
    canvas = Image.new("RGB", (width, len(rows) * (height + _LINE)))
    for number, (row, text) in enumerate(zip(rows, texts, strict=True)):
        canvas.paste(Image.fromarray(row), (0, number * (height + _LINE) + _LINE))
        ImageDraw.Draw(canvas).text((2, number * (height + _LINE) + 1), text, fill=(220, 220, 220))
    canvas.save(path)


def _frames(clip: UInt8[Tensor, "t 3 h w"], times: int) -> list[np.ndarray]:
    wide = clip.repeat_interleave(times, 2).repeat_interleave(times, 3)
    return [np.ascontiguousarray(frame) for frame in wide.permute(0, 2, 3, 1).numpy()]


def _shown(video: Video) -> list[np.ndarray]:
    return _frames(video.frames, max(1, -(-_LEAST // video.size[0])))


def _rate(video: Video) -> float:
    return 1.0 if len(video.times) < 2 else float((len(video.times) - 1) / (video.times[-1] - video.times[0]))


def _mp4(video: Video, path: Path) -> None:
    frames = _shown(video)
    height, width = frames[0].shape[:2]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), _rate(video), (width, height))
    try:
        if not writer.isOpened():
            raise InputError("this machine's OpenCV encodes no mp4; write a .gif", item=str(path))
        for frame in frames:
            writer.write(frame[..., ::-1])
    finally:
        writer.release()


def _gif(video: Video, path: Path | io.BytesIO) -> None:
    first, *others = [Image.fromarray(frame) for frame in _shown(video)]
    first.save(path, "GIF", save_all=True, append_images=others, duration=round(1000 / _rate(video)), loop=0)


def _png(video: Video, path: Path) -> None:
    sheet([video.frames], [video.source], path)


_WRITERS: dict[str, Callable[[Video, Path], None]] = {".mp4": _mp4, ".gif": _gif, ".png": _png}
