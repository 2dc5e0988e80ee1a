"""`sensor_msgs/CompressedImage`: JPEG and PNG by intake's own decoders and limits, colours as image_transport means them.

The format is "jpeg" or "png", or tells where the picture comes from: "rgb8; jpeg compressed bgr8". Where it says that colours were
compressed, but not as bgr, the transport has written red and blue the wrong way round, and its own decoder turns them back; so is done
here (compressed_image_transport, CompressedSubscriber).
"""

from dataclasses import dataclass

from mmsdk.errors import InputError
from mmsdk.vision.intake import load_image
from mmsdk.vision.intake.kinds import HEAD, kind_of
from mmsdk.vision.intake.limits import LIMITS, Limits
from mmsdk.vision.types import Image
from mmsdk.vla.ros.image import octets
from mmsdk.vla.ros.protocols import AnyCompressedImage

__all__ = ["Format", "compressed_picture", "parse_format"]

_CODECS = {"jpeg": "JPEG", "jpg": "JPEG", "png": "PNG"}
_COLOURS = ("rgb8", "rgba8", "bgr8", "bgra8", "rgb16", "rgba16", "bgr16", "bgra16")


@dataclass(frozen=True, slots=True)
class Format:
    """A format string taken apart: the codec ("JPEG", "PNG"), the encoding that was compressed ("": not told), red and blue swapped."""

    codec: str
    source: str = ""
    swapped: bool = False


def parse_format(text: str, item: str = "image") -> Format:
    """A format string. Raises InputError for codecs that are not read, compressedDepth among them: raw depth keeps its values."""
    source, told, rest = text.partition(";")
    words = (rest if told else source).split()
    if words and words[0].lower() == "compresseddepth":
        raise InputError("is compressed depth, which is not read; subscribe to the raw topic", item=item)
    if not words or words[0].lower() not in _CODECS:
        raise InputError(f"the format {text[:60]!r} is not read; expected jpeg or png", item=item)
    encoding = source.strip() if told else ""
    swapped = encoding in _COLOURS and len(words) > 2 and words[1] == "compressed" and not words[2].startswith("bgr")
    return Format(_CODECS[words[0].lower()], encoding, swapped)


def compressed_picture(message: AnyCompressedImage, limits: Limits = LIMITS, item: str = "image") -> Image:
    """The picture, upright and RGB. Raises InputError, naming `item`, for what is too large, damaged, or in another format than it says."""
    format_ = parse_format(message.format, item)
    limits.check_bytes(len(message.data), item)
    data = octets(message.data, item).tobytes()
    kind = kind_of(data[:HEAD], item)
    if kind.name != format_.codec:
        raise InputError(f"says that it is {format_.codec}, but is {kind.name}", item=item)
    try:
        image = load_image(data, limits=limits)
    except InputError as error:
        raise InputError(error.message, item=item) from error
    return Image(image.pixels.flip(0) if format_.swapped else image.pixels, item, image.notes)
