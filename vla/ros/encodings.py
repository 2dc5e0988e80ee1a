"""The names of `sensor_msgs/Image.encoding`: how many numbers a pixel has, of which type, and what they mean.

The table is sensor_msgs/image_encodings.hpp; bayer patterns are named by the first two pixels of the first two rows.
"""

import re
from dataclasses import dataclass
from typing import Literal

from mmsdk.errors import InputError

__all__ = ["Colour", "Encoding", "encoding_of"]

Colour = Literal["rgb", "bgr", "grey", "bayer", "uyvy", "yuyv", "none"]
_CHANNELS: dict[str, tuple[int, Colour]] = {
    "rgb": (3, "rgb"),
    "rgba": (4, "rgb"),
    "bgr": (3, "bgr"),
    "bgra": (4, "bgr"),
    "mono": (1, "grey"),
}
_PATTERNS = ("rggb", "bggr", "gbrg", "grbg")
_PACKED: dict[str, Colour] = {"yuv422": "uyvy", "uyvy": "uyvy", "yuv422_yuy2": "yuyv", "yuyv": "yuyv"}
_PLAIN = re.compile(r"(8U|8S|16U|16S|32S|32F|64F)C([1-9]\d{0,2})")
_TYPES = {"8U": "u1", "8S": "i1", "16U": "u2", "16S": "i2", "32S": "i4", "32F": "f4", "64F": "f8"}
# OpenCV's CV_CN_MAX
_MOST = 512


@dataclass(frozen=True, slots=True)
class Encoding:
    """`channels` numbers a pixel of NumPy's type `dtype` (its byte order is the message's). `pattern` is a bayer mosaic's.

    `colour` "none": the name does not say what the numbers mean, as in 8UC3, 16UC1 and 32FC1.
    """

    name: str
    channels: int
    dtype: str
    colour: Colour = "none"
    pattern: str = ""

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return int(self.dtype[1:])


def encoding_of(name: str, item: str = "image") -> Encoding:
    """What an encoding's name says. Raises InputError for a name that is not known, or not read (nv12 and other planar ones)."""
    if name in _NAMED:
        return _NAMED[name]
    plain = _PLAIN.fullmatch(name)
    if plain and int(plain[2]) <= _MOST:
        return Encoding(name, int(plain[2]), _TYPES[plain[1]])
    told = f"the encoding {name[:40]!r} is not read; there is {', '.join(_NAMED)}, and 8UC1, 16UC1, 32FC1 and their like"
    raise InputError(told, item=item)


def _named() -> dict[str, Encoding]:
    found = [
        Encoding(f"{colour}{bits}", channels, f"u{bits // 8}", meaning)
        for bits in (8, 16)
        for colour, (channels, meaning) in _CHANNELS.items()
    ]
    found += [Encoding(f"bayer_{pattern}{bits}", 1, f"u{bits // 8}", "bayer", pattern) for bits in (8, 16) for pattern in _PATTERNS]
    found += [Encoding(name, 2, "u1", order) for name, order in _PACKED.items()]
    return {encoding.name: encoding for encoding in found}


_NAMED = _named()
