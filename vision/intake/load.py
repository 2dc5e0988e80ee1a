"""The doors of intake: whatever a user names becomes an `Image` or a `Video`, or an InputError that names it."""

import os
from collections.abc import Sequence
from typing import TypeGuard

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vision.intake.access import ACCESS, Access
from mmsdk.vision.intake.animation import decode_animation
from mmsdk.vision.intake.arrays import Colour, array_of, picture_of
from mmsdk.vision.intake.frames import Frames, check_times, counted, noted, timed
from mmsdk.vision.intake.image import decode, picture_in
from mmsdk.vision.intake.limits import LIMITS, Limits
from mmsdk.vision.intake.scenes import changes
from mmsdk.vision.intake.source import Encoded, EncodedSource, Frame, Readable, named_unreadable, opened
from mmsdk.vision.intake.stranger import CLIP, stranger
from mmsdk.vision.intake.video import decode_clip
from mmsdk.vision.sampling import Sampling
from mmsdk.vision.types import Image, Media, Video
from mmsdk.vision.values import shown

__all__ = ["Frames", "Source", "check", "load", "load_all", "load_image", "load_video"]

WHITE = (255, 255, 255)
EIGHT = Sampling(frames=8)


Source = Frame | Video | Frames | Sequence[Frame]


def load(
    source: Source, *, sampling: Sampling = EIGHT, limits: Limits = LIMITS, background: Colour = WHITE, access: Access = ACCESS
) -> Media:
    """A picture or a clip, decided by content and never by a name's ending.

    A clip is a video container, an array of four dimensions, `Frames`, or a sequence of pictures; all else is a picture, an animation too:
    its first frame, with a note (`load_video` reads it as a clip). Raises InputError.
    """
    _check_settings(sampling, limits, access)
    if isinstance(source, Image | Video):
        return _sound(source)
    if _written(source):
        with opened(source, limits, access) as found:
            if found.kind.clip:
                return decode_clip(found, sampling, limits, background)
            return _picture(found, limits, background)
    if isinstance(source, Frames | list | tuple) or (isinstance(source, np.ndarray | Tensor) and source.ndim == 4):
        return load_video(source, sampling=sampling, limits=limits, background=background, access=access)
    return load_image(source, limits=limits, background=background, access=access)


def load_image(source: Source, *, limits: Limits = LIMITS, background: Colour = WHITE, access: Access = ACCESS) -> Image:
    """One picture, upright, RGB, alpha laid over `background`; of an animation the first frame, with a note.

    From a path, bytes, file object, data URI, PIL image, array or tensor (h w, h w c, c h w; where both ends could be channels, an array
    is h w c and a tensor c h w), or an `Image`, which is returned as it is. Raises InputError.
    """
    _check_settings(EIGHT, limits, access)
    if isinstance(source, Image):
        _sound(source)
        return source
    if _written(source):
        with opened(source, limits, access) as found:
            return _picture(found, limits, background)
    if isinstance(source, PIL.Image.Image):
        return decode(source, background, limits, "PIL image")
    if isinstance(source, np.ndarray | Tensor):
        name = "tensor" if isinstance(source, Tensor) else "array"
        return Image(picture_of(array_of(source), background, limits, name, isinstance(source, Tensor)), name)
    raise stranger(source)


def load_video(
    source: Source, *, sampling: Sampling = EIGHT, limits: Limits = LIMITS, background: Colour = WHITE, access: Access = ACCESS
) -> Video:
    """One clip, its frames chosen by `sampling` before any is decoded, with their true times in seconds.

    From a path, bytes, file object or data URI of a video or an animation, from `Frames`, a sequence of pictures or an array t h w c or
    t c h w (one frame a second, for want of a better word), or a `Video`, which is returned as it is. Raises InputError.
    """
    _check_settings(sampling, limits, access)
    if isinstance(source, Video):
        _sound(source)
        return source
    if _written(source):
        with opened(source, limits, access) as found:
            return (decode_clip if found.kind.clip else decode_animation)(found, sampling, limits, background)
    if isinstance(source, Frames):
        return _clip(source, sampling, limits, background, access)
    if isinstance(source, list | tuple | np.ndarray | Tensor):
        return _clip(Frames(source), sampling, limits, background, access)
    raise stranger(source, CLIP)


def load_all(
    sources: Sequence[Source], *, sampling: Sampling = EIGHT, limits: Limits = LIMITS, background: Colour = WHITE, access: Access = ACCESS
) -> list[Image | Video | InputError]:
    """Each source as `load` gives it; one that cannot be used becomes its error, which names its place, and leaves the others alone."""
    _check_settings(sampling, limits, access)
    results: list[Image | Video | InputError] = []
    for index, source in enumerate(sources):
        try:
            results.append(load(source, sampling=sampling, limits=limits, background=background, access=access))
        except InputError as error:
            results.append(error.at(index))
    return results


def check(source: EncodedSource, *, limits: Limits = LIMITS, access: Access = ACCESS) -> None:
    """Raise InputError where a file, an address or bytes cannot be a picture or a clip, told by the first bytes; nothing is decoded."""
    _check_settings(EIGHT, limits, access)
    with opened(source, limits, access):
        pass


def _check_settings(sampling: object, limits: object, access: object) -> None:
    for name, value, kind in (("sampling", sampling, Sampling), ("limits", limits, Limits), ("access", access, Access)):
        if not isinstance(value, kind):
            raise InputError(f"it is {shown(value)}, expected {name}=mmsdk.{kind.__name__}(...), or nothing", item=name)


def _written(source: Source) -> TypeGuard[EncodedSource]:
    # a class is no file, though it has the methods of one
    return isinstance(source, str | os.PathLike | bytes | bytearray | memoryview | Readable) and not isinstance(source, type)


def _picture(found: Encoded, limits: Limits, background: Colour) -> Image:
    with picture_in(found, limits) as picture:
        return decode(picture, background, limits, found.item)


def _clip(clip: Frames, sampling: Sampling, limits: Limits, background: Colour, access: Access) -> Video:
    """Frames as a clip; only those that are taken are decoded."""
    count = counted(clip)

    def frame(index: int) -> Image:
        # the sequence may be the caller's own
        with named_unreadable(f"frame {index}"):
            picture = clip.pictures[index]
        return _frame(picture, index, limits, background, access)

    def scored() -> npt.NDArray[np.float64]:
        return changes(((index, frame(index).pixels.permute(1, 2, 0).numpy()) for index in range(count)), np.arange(float(count)))

    taken, times = timed(clip, count, sampling, scored)
    frames: list[Image] = []
    for index in taken:
        frames.append(frame(index))
        if len(frames) == 1:
            _check_clip(len(taken), frames[0], limits)
        if frames[-1].size != frames[0].size:
            told = f"frame {index} is {frames[-1].size}, the first is {frames[0].size} (height, width)"
            raise InputError(f"{told}; expected one size", item="frames")
    return Video(torch.stack([frame.pixels for frame in frames]), times, "frames", noted([frame.notes for frame in frames], taken))


def _sound(media: Image | Video) -> Image | Video:
    """An image or a clip that a program made itself, if its shape and type are what they claim and there is something to see."""
    moving = isinstance(media, Video)
    pixels: object = media.frames if isinstance(media, Video) else media.pixels
    wanted = f"expected a tensor of uint8, {'t 3 h w' if moving else '3 h w'}; load makes it of any array"
    if not isinstance(pixels, Tensor):
        raise InputError(f"its pixels are {type(pixels).__name__}, {wanted}", item=media.source)
    plain = pixels.layout == torch.strided and not pixels.is_meta
    if not plain or pixels.dtype != torch.uint8 or pixels.ndim != 3 + moving or pixels.shape[-3] != 3:
        raise InputError(f"{pixels.dtype} of shape {tuple(pixels.shape)} on {pixels.device}, {wanted}", item=media.source)
    if not pixels.numel():
        raise InputError("has no pixels; give at least one frame of at least 1x1", item=media.source)
    if isinstance(media, Video):
        check_times(media.times, len(pixels), media.source)
    return media


def _check_clip(count: int, first: Image, limits: Limits) -> None:
    pixels = count * first.size[0] * first.size[1]
    if pixels > limits.clip_pixels:
        told = f"{count} frames are {pixels:,} pixels, but at most {limits.clip_pixels:,} are kept (Limits.clip_pixels)"
        raise InputError(f"{told}; sample fewer or make them smaller", item="frames")


def _frame(picture: Frame, index: int, limits: Limits, background: Colour, access: Access) -> Image:
    try:
        return load_image(picture, limits=limits, background=background, access=access)
    except InputError as error:
        raise error.within(index, picture) from error
