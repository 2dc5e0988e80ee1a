"""One clip from its encoded bytes: frames chosen by their true times before any is decoded, then read one at a time.

Only where one frame of each scene is wanted, the clip is decoded twice: once for its scenes, once for those frames.
"""

from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import UInt8
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vision.intake.arrays import Colour, over, shrinking, shrunk, to_pixels
from mmsdk.vision.intake.codec import codec_of
from mmsdk.vision.intake.limits import Limits
from mmsdk.vision.intake.opencv import OpenCVReader
from mmsdk.vision.intake.pyav import PyAVReader
from mmsdk.vision.intake.reader import Open, Reader
from mmsdk.vision.intake.scenes import changes
from mmsdk.vision.intake.source import Encoded
from mmsdk.vision.sampling import UNSEEN, Sampling
from mmsdk.vision.types import Video

__all__ = ["best_reader", "decode_clip"]


def best_reader() -> Open:
    """PyAV where it is installed (mmsdk[video]), else OpenCV, which always is."""
    return PyAVReader.of if find_spec("av") else OpenCVReader.of


def decode_clip(source: Encoded, sampling: Sampling, limits: Limits, background: Colour, reader: Open | None = None) -> Video:
    """Sample a clip, by the best reader there is unless one is named.

    A clip that is cut short or damaged gives the frames that decode, with a note; never a frame twice. Raises InputError for what has
    no moving pictures, no decoder (the codec is named), not one frame that decodes, or more frames or pixels than allowed.
    """
    with (reader or best_reader())(source, limits) as clip:
        limits.check_size(*clip.size, source.item)
        starts = clip.starts()
        limits.check_frames(len(starts), source.item)
        scored = UNSEEN if sampling.scenes is None else _changes(clip, starts, background)
        chosen = starts[sampling.chosen(starts, changes=scored)]
        scale = limits.scale(len(chosen), *clip.size)
        notes = ("the file is cut short: its last frames are missing",) if clip.cut else ()
        times, frames = _read(clip, chosen, scale, background, source.item)
    if not frames:
        message = f"not one frame decodes: it is damaged, or there is no decoder for its codec, {codec_of(source.stream)}"
        raise InputError(message, item=source.item)
    if len(frames) < len(chosen):
        notes = (*notes, f"{len(chosen) - len(frames)} of the {len(chosen)} frames to be taken do not decode and are left out")
    return Video(torch.stack(frames), torch.tensor(times, dtype=torch.float32), source.item, notes + shrinking(scale))


def _changes(clip: Reader, starts: npt.NDArray[np.float64], background: Colour) -> npt.NDArray[np.float64]:
    return changes(((time, over(pixels, background)) for time, pixels in clip.frames(starts.tolist())), starts)


def _read(
    clip: Reader, chosen: npt.NDArray[np.float64], scale: float, background: Colour, item: str
) -> tuple[list[float], list[UInt8[Tensor, "3 h w"]]]:
    times: list[float] = []
    frames: list[Tensor] = []
    for time, pixels in clip.frames(chosen.tolist()):
        times.append(time)
        frames.append(to_pixels(shrunk(over(pixels, background), scale)))
        if frames[-1].shape != frames[0].shape:
            raise InputError(f"the size of the picture changes within the clip, at {time:.2f} s", item=item)
    return times, frames
