"""Animated pictures (GIF, WebP, APNG) as clips: walked frame by frame, keeping only those that are sampled."""

import PIL.Image
import torch

from mmsdk.errors import InputError
from mmsdk.vision.intake.arrays import Colour, shrinking, shrunk, to_pixels
from mmsdk.vision.intake.image import named_failures, picture_in, rgb
from mmsdk.vision.intake.limits import Limits
from mmsdk.vision.intake.source import Encoded
from mmsdk.vision.sampling import Sampling
from mmsdk.vision.types import Video

__all__ = ["decode_animation"]

# What browsers show a frame for that asks for no time at all.
SHORTEST = 0.1


def decode_animation(source: Encoded, sampling: Sampling, limits: Limits, background: Colour) -> Video:
    """Sample an animation: one walk for the times, a second for the chosen frames. A still picture is a clip of one frame.

    Raises InputError for a damaged file, for more frames than `limits.frames`, and for too many pixels together.
    """
    with picture_in(source, limits) as picture:
        starts, length = _starts(picture, limits, source.item)
        chosen = sampling.chosen(starts, length)
        scale = limits.scale(len(chosen), picture.height, picture.width)
        frames = []
        for index in chosen:
            with named_failures(source.item):
                picture.seek(index)
                # the pages of a TIFF are as different as they like
                limits.check_size(picture.height, picture.width, source.item)
                frames.append(to_pixels(shrunk(rgb(picture, background, source.item), scale)))
            if frames[-1].shape != frames[0].shape:
                raise InputError(f"frame {index} has another size than the first; pass its pages as pictures", item=source.item)
        times = [starts[index] for index in chosen]
    return Video(torch.stack(frames), torch.tensor(times, dtype=torch.float32), source.item, shrinking(scale))


def _starts(picture: PIL.Image.Image, limits: Limits, item: str) -> tuple[list[float], float]:
    """The second at which each frame begins, and the length of all."""
    starts: list[float] = []
    clock = 0.0
    while True:
        try:
            picture.seek(len(starts))
        except EOFError:
            break
        except (OSError, SyntaxError, ValueError, IndexError) as error:
            raise InputError(f"the animation is truncated or corrupt at frame {len(starts)} ({error})", item=item) from error
        starts.append(clock)
        limits.check_frames(len(starts), item)
        duration = picture.info.get("duration", 0)
        clock += float(duration) / 1000 if isinstance(duration, int | float) and duration > 0 else SHORTEST
    picture.seek(0)
    return starts, clock
