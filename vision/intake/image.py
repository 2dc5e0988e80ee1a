"""One picture from encoded bytes or a PIL image: upright, RGB, eight bits, alpha laid over a declared background.

The content decides the format, never the name. The size is read from the header and checked before anything is decoded.
"""

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import PIL.Image
import PIL.ImageFile
import PIL.JpegImagePlugin

from mmsdk.errors import InputError
from mmsdk.vision.intake.arrays import Colour, eight_bit, over, to_pixels
from mmsdk.vision.intake.exif import apart, orientation, upright
from mmsdk.vision.intake.kinds import Kind
from mmsdk.vision.intake.limits import Limits
from mmsdk.vision.intake.png import keyed_out
from mmsdk.vision.intake.source import Encoded
from mmsdk.vision.types import Image

__all__ = ["ANIMATED", "assumed", "decode", "named_failures", "picture_in", "rgb"]

ANIMATED = "the first of several frames; mmsdk.load_video reads them all"
"""The note on an animation that was taken for a picture; programs without Python have other words for what to do."""

# What PIL's decoders were seen to raise at damage; warnings, because a program may have made them errors.
DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    LookupError,
    EOFError,
    TypeError,
    OverflowError,
    RuntimeError,
    struct.error,
    zlib.error,
    Warning,
)


@contextmanager
def picture_in(source: Encoded, limits: Limits) -> Iterator[PIL.Image.Image]:
    """The picture of a source with its header read and its size checked, closed afterwards. Raises InputError."""
    limits.check_bytes(source.size, source.item)
    factory = _factory(source.kind, source.item)
    # a copy in memory, so that PIL closes that and not a file of the caller's
    content, exif = apart(source.read(limits)) if source.kind.name == "JPEG" else (source.read(limits), b"")
    limits.check_size(*_webp_size(content), source.item)
    # Not PIL.Image.open: its own limit on pixels is a global of the process, and a warning below twice that limit.
    with named_failures(source.item), factory(_Whole(content)) as picture:
        limits.check_size(picture.height, picture.width, source.item)
        if exif:
            picture.info["exif"] = exif
        yield picture


def decode(picture: PIL.Image.Image, background: Colour, limits: Limits, item: str) -> Image:
    """A PIL image as ours, at the frame it stands at; the first of several is noted. The PIL image is not changed."""
    limits.check_size(picture.height, picture.width, item)
    if _shut(picture):
        raise InputError("was closed before its pixels were read; pass its path, or call its load() before it is closed", item=item)
    with named_failures(item):
        notes = _notes(picture)
        pixels = to_pixels(rgb(picture, background, item))
        return Image(pixels, item, notes + assumed(picture))


def rgb(picture: PIL.Image.Image, background: Colour, item: str) -> npt.NDArray[np.uint8]:
    """The pixels of a PIL image, h w 3 and upright. Raises InputError for values outside of the range of its mode."""
    # before the pixels: PIL then forgets how many bits the file has
    clear = keyed_out(picture)
    picture.load()
    # after the pixels: a PNG may tell its orientation behind them
    exif = picture.info.get("exif", b"")
    turned = orientation(exif) if isinstance(exif, bytes) and picture.format != "TIFF" else 1
    pixels = _eight_bit(picture, item) if clear is None else _with_alpha(np.asarray(picture), ~clear)
    return upright(over(pixels, background), turned)


def assumed(picture: PIL.Image.Image) -> tuple[str, ...]:
    """The note on what was assumed of a picture's numbers, where its mode leaves that open; of one whose pixels are read."""
    return ("mode I says nothing of its range; all values lie in 0..255 and were taken as 8 bits",) if _small(picture) else ()


@contextmanager
def named_failures(item: str) -> Iterator[None]:
    """Turn what PIL's decoders raise at damaged content into an InputError that says truncated or corrupt."""
    try:
        yield
    except InputError:
        raise
    except PIL.Image.DecompressionBombError as error:
        raise InputError(f"a part of it exceeds the limit on pixels ({error})", item=item) from error
    except DAMAGE as error:
        cut = any(word in str(error).lower() for word in ("truncated", "eof", "not enough", "too short", "incomplete"))
        raise InputError(f"the picture is {'truncated' if cut else 'corrupt or truncated'} ({error})", item=item) from error


class _Whole(io.BytesIO):
    """Bytes that cannot be read past their end: where another library has set PIL's LOAD_TRUNCATED_IMAGES, which is a global of the
    process, PIL would paint what is missing grey."""

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if not data and size:
            raise OSError("image file is truncated")
        return data


def _factory(kind: Kind, item: str) -> Callable[[BinaryIO], PIL.ImageFile.ImageFile]:
    if kind.clip:
        raise InputError(f"{kind.name} is a clip; hand it over as one: mmsdk.load_video, in a request video_url", item=item)
    if kind.name == "JPEG":
        # what PIL registers for it also looks for further pictures in the file, and warns of what it does not find
        return PIL.JpegImagePlugin.JpegImageFile
    name = kind.name.upper()
    if name not in PIL.Image.OPEN:
        PIL.Image.init()
    if name not in PIL.Image.OPEN:
        raise InputError(f"{kind.name} is not known to this Pillow", item=item)
    opener = PIL.Image.OPEN[name][0]
    return lambda stream: opener(stream, "")


def _shut(picture: PIL.Image.Image) -> bool:
    """Whether the pixels of a lazily opened picture are still to be read from a file that is closed."""
    if not isinstance(picture, PIL.ImageFile.ImageFile) or not picture.tile or picture.format == "AVIF":
        return False
    return picture.fp is None or bool(getattr(picture.fp, "closed", False))


def _webp_size(head: bytes) -> tuple[int, int]:
    """Height and width of a WebP (RFC 9649), whose decoder sets memory aside when it opens; 1, 1 for all else."""
    if head[:4] != b"RIFF" or head[8:12] != b"WEBP" or len(head) < 30:
        return 1, 1
    numbers = int.from_bytes(head[20:30], "little")
    match head[12:16]:
        case b"VP8X":
            return (numbers >> 56) + 1, (numbers >> 32 & 0xFFFFFF) + 1
        case b"VP8L":
            return (numbers >> 22 & 0x3FFF) + 1, (numbers >> 8 & 0x3FFF) + 1
        case b"VP8 ":
            return numbers >> 64 & 0x3FFF, numbers >> 48 & 0x3FFF
    return 1, 1


def _notes(picture: PIL.Image.Image) -> tuple[str, ...]:
    if isinstance(picture, PIL.ImageFile.ImageFile) and picture.format == "GIF" and picture.fp is None:
        # closed after its pixels were read: where there is a second frame cannot be seen any more
        return ()
    # A phone's JPEG may carry a depth map or preview as a second picture (MPO), which is no animation.
    several = picture.format != "MPO" and getattr(picture, "is_animated", False)
    return (ANIMATED,) if several else ()


def _small(picture: PIL.Image.Image) -> bool:
    """Whether 32 bits hold values of 8, as they do of an array of int32; a PNG or PGM in this mode is known to be of 16."""
    if picture.mode != "I" or picture.format in ("PNG", "PPM"):
        return False
    values = np.asarray(picture)
    return bool(values.min() >= 0 and values.max() <= 255)


def _eight_bit(picture: PIL.Image.Image, item: str) -> npt.NDArray[np.uint8]:
    """h w c with c 1, 3 or 4."""
    mode = picture.mode
    if mode.startswith("I"):
        # 16 bits, whatever PIL keeps them in, unless they are seen to be 8
        values = np.asarray(picture).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise InputError(f"mode {mode} values lie in [{values.min()}, {values.max()}], expected [0, 65535]", item=item)
        grey = eight_bit(values.astype(np.uint8 if _small(picture) else np.uint16), item)
        key = picture.info.get("transparency")
        # a PNG's transparent level is told in the bits of its values, and compared before they are scaled
        return _with_alpha(grey, values != key) if isinstance(key, int) else grey[..., None]
    if mode == "F":
        return eight_bit(np.asarray(picture), item)[..., None]
    wanted = "RGBA" if picture.has_transparency_data else "L" if mode in ("1", "L") else "RGB"
    try:
        pixels = np.asarray(picture.convert(wanted))
    except ValueError as error:
        raise InputError(f"PIL cannot turn its mode {mode} into {wanted} ({error}); convert it first", item=item) from error
    return pixels[..., None] if wanted == "L" else pixels


def _with_alpha(pixels: npt.NDArray[np.uint8], opaque: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """h w (grey) or h w 3 as h w 4, transparent but where it is opaque."""
    colour = np.broadcast_to(pixels.reshape(*opaque.shape, -1), (*opaque.shape, 3))
    return np.dstack([colour, opaque.astype(np.uint8) * np.uint8(255)])
