"""What is given where a picture or a clip was expected: told by what it is, with what would do."""

from collections.abc import Iterator, Mapping, Sequence, Set

from mmsdk.errors import InputError
from mmsdk.vision.types import Video
from mmsdk.vision.values import shown

__all__ = ["CLIP", "PICTURE", "stranger"]

PICTURE = "is no picture; expected a path, bytes, a binary file, a data URI, a PIL image, an array or a tensor"
CLIP = "is no clip; expected a video, an animation, Frames, or a list of pictures"


def stranger(source: object, told: str = PICTURE) -> InputError:
    """The error for something that is none of what is accepted: it tells its type, of a number its value, and what to do with it."""
    name = type(source).__name__
    what = f"{name} {shown(source)}" if isinstance(source, int | float | complex) else name
    hint = _hint(source) or ("; mmsdk.load_video reads clips" if told == PICTURE and isinstance(source, Video | Sequence) else "")
    return InputError(f"{what} {told}{hint}", item="source")


def _hint(source: object) -> str:
    if isinstance(source, Mapping):
        return "; pass what stands under one of its keys"
    if isinstance(source, Iterator):
        return "; make it a list first: list(...)"
    if isinstance(source, Set):
        return "; a set has no order: make it a list"
    return ""
