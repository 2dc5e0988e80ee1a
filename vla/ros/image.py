"""`sensor_msgs/Image` both ways: rows of `step` bytes in either byte order, as pictures, as depth, and back.

Sizes are checked against the limits of intake, and against how many bytes there are, before anything is set aside for them.
"""

from typing import Literal

import cv2
import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vision.intake.arrays import Array, eight_bit
from mmsdk.vision.intake.limits import LIMITS, Limits
from mmsdk.vla.ros.encodings import Encoding, encoding_of
from mmsdk.vla.ros.messages import Header, Image
from mmsdk.vla.ros.protocols import AnyImage, Octets

__all__ = ["Unnamed", "depth_of", "image_message", "numbers_of", "octets", "picture_of"]

Unnamed = Literal["refuse", "rgb", "bgr"]
"""In which order the channels of 8UC3 and 8UC4 are, which their name leaves open."""

_MILLIMETRE = 1e-3
# OpenCV names a mosaic by the second row's second and third pixel, ROS by the first two of the first two rows
_DEMOSAIC = {
    "rggb": cv2.COLOR_BayerBG2RGB,
    "bggr": cv2.COLOR_BayerRG2RGB,
    "gbrg": cv2.COLOR_BayerGR2RGB,
    "grbg": cv2.COLOR_BayerGB2RGB,
}
_UNPACK = {"uyvy": cv2.COLOR_YUV2RGB_UYVY, "yuyv": cv2.COLOR_YUV2RGB_YUY2}


def numbers_of(message: AnyImage, limits: Limits = LIMITS, item: str = "image") -> Array:
    """The message's own numbers h w c, read only, in its type and byte order, without the rows' padding; nothing is copied.

    (But for data in a plain list, which is copied once its length is known to fit.) Raises InputError for an encoding that is not read, a
    size beyond `limits`, a `step` shorter than a row, and data that are not `step` times `height` bytes.
    """
    encoding = encoding_of(message.encoding, item)
    height, width, step = int(message.height), int(message.width), int(message.step)
    limits.check_size(height, width, item)
    pixel = encoding.channels * encoding.itemsize
    if step < width * pixel:
        raise InputError(f"a step of {step} bytes, but {width} pixels of {encoding.name} are {width * pixel}", item=item)
    if len(message.data) != step * height:
        told = f"{len(message.data):,} bytes of data, but {height} rows of {step} bytes are {step * height:,}"
        raise InputError(f"{told}; the message is truncated or its size is wrong", item=item)
    dtype = np.dtype((">" if message.is_bigendian else "<") + encoding.dtype)
    strides = (step, pixel, encoding.itemsize)
    view: Array = np.ndarray((height, width, encoding.channels), dtype, octets(message.data, item), strides=strides)
    view.flags.writeable = False
    return view


def picture_of(message: AnyImage, limits: Limits = LIMITS, item: str = "image", unnamed: Unnamed = "refuse") -> npt.NDArray[np.uint8]:
    """RGB pixels h w 3: channels in order, alpha dropped, grey repeated, mosaics and 4:2:2 interpolated, 16 bits scaled to 8.

    `unnamed` says what 8UC3 and 8UC4 hold. Raises InputError as `numbers_of` does, and for depth and other numbers that are no colours.
    """
    encoding = encoding_of(message.encoding, item)
    numbers = numbers_of(message, limits, item)
    order = encoding.colour
    if order == "none" and encoding.dtype == "u1" and encoding.channels in (3, 4) and unnamed != "refuse":
        order = unnamed
    match order:
        case "rgb":
            return eight_bit(numbers[..., :3], item)
        case "bgr":
            return eight_bit(numbers[..., 2::-1], item)
        case "grey":
            return eight_bit(numbers, item).repeat(3, axis=-1)
        case "bayer":
            return _demosaiced(encoding, numbers, item)
        case "uyvy" | "yuyv":
            return _unpacked(order, numbers, item)
    raise InputError(f"{encoding.name} does not say what its numbers mean; it is no picture as it stands", item=item)


def depth_of(message: AnyImage, limits: Limits = LIMITS, item: str = "image") -> Float[Tensor, "h w"]:
    """Depth in metres, float32, NaN where it is not known: of 16UC1 and mono16 (millimetres, 0 is not known) or 32FC1 (metres).

    REP 118: in 32FC1 -inf is too near and +inf too far to be measured; they stay. Raises InputError for other encodings.
    """
    numbers = numbers_of(message, limits, item)
    if message.encoding == "32FC1":
        return torch.from_numpy(numbers[..., 0].astype(np.float32))
    if message.encoding not in ("16UC1", "mono16"):
        raise InputError(f"{message.encoding} is no depth; expected 16UC1 (mm) or 32FC1 (m)", item=item)
    depth = numbers[..., 0].astype(np.float32) * np.float32(_MILLIMETRE)
    depth[depth == 0] = np.nan
    return torch.from_numpy(depth)


def image_message(numbers: Array, encoding: str, header: Header = Header(), step: int = 0, is_bigendian: bool = False) -> Image:
    """Numbers h w or h w c, of the encoding's own type, as a message; `step` (0: no padding) is the bytes of a row, padded with zeros.

    Raises InputError where the numbers are not of the encoding's type and channels, or a row does not fit into `step`.
    """
    found = encoding_of(encoding)
    pixels = numbers[..., None] if numbers.ndim == 2 else numbers
    dtype = np.dtype(found.dtype)
    if pixels.ndim != 3 or pixels.shape[2] != found.channels or pixels.dtype.newbyteorder("=") != dtype:
        raise InputError(f"{numbers.dtype} of shape {numbers.shape}, expected {dtype} h w {found.channels}", item=encoding)
    height, width = pixels.shape[:2]
    row = width * found.channels * dtype.itemsize
    if step and step < row:
        raise InputError(f"a step of {step} bytes is shorter than a row of {row}", item=encoding)
    lines = np.zeros((height, step or row), np.uint8)
    ordered = np.ascontiguousarray(pixels, dtype.newbyteorder(">" if is_bigendian else "<"))
    lines[:, :row] = ordered.reshape(height, -1).view(np.uint8)
    return Image(header, height, width, encoding, int(is_bigendian), step or row, lines.tobytes())


def octets(data: Octets, item: str = "image") -> npt.NDArray[np.uint8]:
    """A uint8[] field as an array, without a copy unless it is a plain list. Raises InputError for what holds no single bytes."""
    if isinstance(data, list | tuple):
        if not all(isinstance(value, int) and 0 <= value <= 255 for value in data):
            raise InputError("its data are no whole numbers from 0 to 255", item=item)
        return np.frombuffer(bytes(data), np.uint8)
    try:
        view = memoryview(data)  # type: ignore[arg-type]  # a Sequence need not be a buffer: then this raises
    except TypeError:
        raise InputError(f"its data are a {type(data).__name__}, expected bytes", item=item) from None
    if view.itemsize != 1 or view.ndim != 1 or not view.contiguous:
        raise InputError(f"its data are of format {view.format!r} and shape {view.shape}, expected bytes", item=item)
    return np.frombuffer(view, np.uint8)


def _demosaiced(encoding: Encoding, numbers: Array, item: str) -> npt.NDArray[np.uint8]:
    if min(numbers.shape[:2]) < 3:
        raise InputError(f"a mosaic of {numbers.shape[1]}x{numbers.shape[0]} pixels is too small to be interpolated", item=item)
    native = np.ascontiguousarray(numbers[..., 0], np.dtype(encoding.dtype))
    return eight_bit(np.asarray(cv2.demosaicing(native, _DEMOSAIC[encoding.pattern])), item)


def _unpacked(order: Literal["uyvy", "yuyv"], numbers: Array, item: str) -> npt.NDArray[np.uint8]:
    if numbers.shape[1] % 2:
        raise InputError(f"a width of {numbers.shape[1]}, but two pixels share their colour in {order}", item=item)
    return np.asarray(cv2.cvtColor(np.ascontiguousarray(numbers), _UNPACK[order]), np.uint8)
