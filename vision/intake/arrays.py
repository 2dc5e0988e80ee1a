"""Pixels that already are numbers: numpy arrays and tensors of any layout, depth and stride."""

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.masked import MaskedTensor

from mmsdk.errors import InputError
from mmsdk.vision.intake.limits import Limits
from mmsdk.vision.values import real, shown

__all__ = ["Array", "Colour", "array_of", "eight_bit", "over", "picture_of", "shrinking", "shrunk", "to_pixels"]

Array = npt.NDArray[Any]
Colour = tuple[int, int, int]

CHANNELS = (1, 3, 4)


def array_of(source: "Array | Tensor") -> Array:
    """A view of the source's numbers as numpy; a tensor comes to the CPU, and floats that numpy lacks (bfloat16, float8) become float32.

    Raises InputError for a tensor without numbers of its own (sparse, nested, quantised, or on the meta device), and for values that are
    masked.
    """
    if not isinstance(source, Tensor):
        _check_unmasked(source)
        # a plain array, because a matrix or a masked array has rules of its own
        return np.asarray(source)
    if isinstance(source, MaskedTensor):
        raise InputError("a masked tensor is no picture; fill what is masked first: tensor.to_tensor(0)", item="tensor")
    if source.layout != torch.strided or source.is_nested or source.is_quantized or source.is_meta:
        told = f"a {'nested' if source.is_nested else source.layout} tensor of {source.dtype} on {source.device}"
        raise InputError(f"{told} holds no plain numbers; make it dense", item="tensor")
    tensor = source.detach().cpu().resolve_conj().resolve_neg()
    lacking = tensor.is_floating_point() and tensor.dtype not in {torch.float16, torch.float32, torch.float64}
    try:
        view: Array = (tensor.float() if lacking else tensor).numpy()
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"{type(source).__name__} of {source.dtype} gives no numbers ({error}); make it a plain tensor", item="tensor"
        ) from error
    return view


def picture_of(array: Array, background: Colour, limits: Limits, item: str, channels_first: bool) -> UInt8[Tensor, "3 h w"]:
    """One picture from h w, h w c or c h w, with c 1 (grey), 3 or 4 (alpha, laid over `background`).

    `channels_first` decides where both ends could be channels, as in 3x40x3. uint8 stands for itself, uint16 is scaled, bool is black and
    white, floats lie in [0, 1], other whole numbers in 0..255. The source is never changed nor shared.
    """
    if array.ndim == 1:
        raise InputError(f"an array of shape {array.shape} is no picture; for an encoded file, pass array.tobytes()", item=item)
    if array.ndim not in (2, 3) or 0 in array.shape:
        raise InputError(f"an array of shape {array.shape} is no picture; expected h w, h w c or c h w, c 1, 3 or 4", item=item)
    pixels = array[..., None] if array.ndim == 2 else _channels_last(array, item, channels_first)
    limits.check_size(pixels.shape[0], pixels.shape[1], item)
    return to_pixels(over(eight_bit(pixels, item), background))


def _check_unmasked(array: Array) -> None:
    """A mask says that what stands under it is not to be looked at, and only its owner knows what is to be seen there instead."""
    # of a record, which is no picture, the mask is one too
    if isinstance(array, np.ma.MaskedArray) and array.dtype.names is None and np.ma.is_masked(array):
        told = f"{int(np.ma.getmaskarray(array).sum())} of its {array.size} values are masked"
        raise InputError(f"{told}; fill them first: array.filled(0)", item="array")


def eight_bit(array: Array, item: str) -> npt.NDArray[np.uint8]:
    """The array as bytes, scaled where its type has another range. Raises InputError for values outside of that range."""
    kind = array.dtype.kind
    if array.dtype == np.uint8:
        return array
    # in either order of bytes
    if kind == "u" and array.dtype.itemsize == 2:
        return ((array.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
    if kind == "b":
        return array.astype(np.uint8) * np.uint8(255)
    if kind not in "iuf":
        raise InputError(f"an array of {array.dtype} holds no pixels; expected whole numbers, floats or bool", item=item)
    low, high, top = float(array.min()), float(array.max()), 1.0 if kind == "f" else 255.0
    # resizing overshoots by a rounding error; NaN fails this comparison, as it should
    slack = 1e-3 if kind == "f" else 0.0
    if not (low >= -slack and high <= top + slack):
        raise InputError(f"{array.dtype} values lie in [{low:g}, {high:g}], expected [0, {top:g}]; {_fix(kind, low, high)}", item=item)
    scaled = np.rint(array.astype(np.float32).clip(0, 1) * 255) if kind == "f" else array
    return scaled.astype(np.uint8)


def _fix(kind: str, low: float, high: float) -> str:
    if not (np.isfinite(low) and np.isfinite(high)):
        return "there are values in it that are no finite numbers: replace them, as np.nan_to_num does"
    if low < 0:
        return "there are values below 0 in it: undo what normalised or shifted them"
    return "divide by 255 or convert to uint8" if kind == "f" else "convert to uint8 or uint16"


def over(pixels: npt.NDArray[np.uint8], background: Colour) -> npt.NDArray[np.uint8]:
    """h w c with c 1, 3 or 4 as h w 3: grey repeated, alpha laid over the background."""
    if pixels.shape[-1] == 1:
        return pixels.repeat(3, axis=-1)
    if pixels.shape[-1] == 3:
        return pixels
    if not isinstance(background, Sequence | np.ndarray) or len(background) != 3 or not all(0 <= real(part) <= 255 for part in background):
        raise InputError(f"{shown(background)} is no colour; expected three numbers from 0 to 255", item="background")
    # 255 * 255 + 127 still fits 16 bits
    alpha = pixels[..., 3:].astype(np.uint16)
    blend = pixels[..., :3] * alpha + np.asarray(background, np.uint16) * (255 - alpha)
    return ((blend + 127) // 255).astype(np.uint8)


def to_pixels(pixels: npt.NDArray[np.uint8]) -> UInt8[Tensor, "3 h w"]:
    """h w 3 as a new, contiguous tensor 3 h w."""
    return torch.from_numpy(np.array(pixels.transpose(2, 0, 1), order="C", copy=True))


def shrunk(pixels: npt.NDArray[np.uint8], scale: float) -> npt.NDArray[np.uint8]:
    """h w 3 with each side made `scale` times as long, at least one pixel; as it is for a scale of 1."""
    if scale == 1.0:
        return pixels
    height, width = pixels.shape[:2]
    size = max(1, int(width * scale)), max(1, int(height * scale))
    return np.asarray(cv2.resize(np.ascontiguousarray(pixels), size, interpolation=cv2.INTER_AREA), np.uint8)


def shrinking(scale: float) -> tuple[str, ...]:
    """The note on frames that were made smaller."""
    return (f"frames shrunk to {scale:.3f} of their sides to fit Limits.clip_pixels",) if scale < 1.0 else ()


def _channels_last(pixels: Array, item: str, channels_first: bool) -> Array:
    first, last = pixels.shape[0] in CHANNELS, pixels.shape[-1] in CHANNELS
    if not first and not last:
        raise InputError(f"an array of shape {pixels.shape} has no side of 1, 3 or 4 channels", item=item)
    return pixels.transpose(1, 2, 0) if first and (channels_first or not last) else pixels
