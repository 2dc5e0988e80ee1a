"""Animated pictures (GIF, WebP, APNG) as clips: walked frame by frame, keeping only those that are sampled."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch

from mmsdk.errors import InputError
from mmsdk.vision.intake.arrays import Colour, shrinking, shrunk, to_pixels
from mmsdk.vision.intake.frames import noted
from mmsdk.vision.intake.image import assumed, named_failures, picture_in, rgb
from mmsdk.vision.intake.limits import Limits
from mmsdk.vision.intake.scenes import changes
from mmsdk.vision.intake.source import Encoded
from mmsdk.vision.sampling import UNSEEN, Sampling
from mmsdk.vision.types import Video

__all__ = ["decode_animation"]

# What browsers show a frame for that asks for no time at all.
SHORTEST = 0.1
# PIL tells how long a frame of these is shown only when it is decoded.
TIMED_LATE = {"AVIF", "WEBP"}


def decode_animation(source: Encoded, sampling: Sampling, limits: Limits, background: Colour) -> Video:
    """Sample an animation: one walk for the times, a second for the chosen frames. A still picture is a clip of one frame.

    Raises InputError for a damaged file, and for more frames or pixels than `limits` allow to be drawn.
    """
    with picture_in(source, limits) as picture:
        starts, length = _starts(picture, limits, source.item)
        scored = UNSEEN if sampling.scenes is None else changes(_drawn(picture, starts, background, source.item), np.asarray(starts))
        chosen = sampling.chosen(starts, length, scored)
        scale = limits.scale(len(chosen), picture.height, picture.width)
        frames = []
        notes: list[tuple[str, ...]] = []
        for index in chosen:
            with named_failures(source.item):
                picture.seek(index)
                # the pages of a TIFF are as different as they like
                limits.check_size(picture.height, picture.width, source.item)
                frames.append(to_pixels(shrunk(rgb(picture, background, source.item), scale)))
                notes.append(assumed(picture))
            if frames[-1].shape != frames[0].shape:
                raise InputError(f"frame {index} has another size than the first; pass its pages as pictures", item=source.item)
        times = [starts[index] for index in chosen]
    told = noted(notes, chosen) + shrinking(scale)
    return Video(torch.stack(frames), torch.tensor(times, dtype=torch.float32), source.item, told)


def _starts(picture: PIL.Image.Image, limits: Limits, item: str) -> tuple[list[float], float]:
    """The second at which each frame begins, and the length of all."""
    starts: list[float] = []
    clock, drawn = 0.0, 0
    while _reached(picture, len(starts), limits, item):
        starts.append(clock)
        drawn += picture.height * picture.width
        limits.check_drawn(len(starts), drawn, item)
        duration = picture.info.get("duration", 0)
        clock += float(duration) / 1000 if isinstance(duration, int | float) and duration > 0 else SHORTEST
    picture.seek(0)
    return starts, clock


def _drawn(
    picture: PIL.Image.Image, starts: Sequence[float], background: Colour, item: str
) -> Iterator[tuple[float, npt.NDArray[np.uint8]]]:
    """Every frame as it is drawn, with its time."""
    for index, start in enumerate(starts):
        with named_failures(item):
            picture.seek(index)
            pixels = rgb(picture, background, item)
        yield start, pixels


def _reached(picture: PIL.Image.Image, index: int, limits: Limits, item: str) -> bool:
    """Go to a frame, so that the picture tells how long it is shown; False past the last one."""
    try:
        picture.seek(index)
    except EOFError:
        return False
    except (OSError, SyntaxError, IndexError) as error:
        raise InputError(f"the animation is truncated or corrupt at frame {index} ({error})", item=item) from error
    # a frame may reach beyond the picture, which then grows
    limits.check_size(picture.height, picture.width, item)
    if picture.format in TIMED_LATE:
        with named_failures(item):
            picture.load()
    return True
