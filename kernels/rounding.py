"""The rule by which keys and values are kept in fewer bits: one place for whoever rounds and whoever reads, in torch and in Triton.

    scale = (max - min) / (2^b - 1),   code = round((x - min) / scale),   x is about min + code * scale        int8, int4, int2
    scale = max |x| / 448,             code = e4m3(x / scale),            x is about code * scale              fp8

with one scale and one minimum a group. Codes are made with the scales as they are stored, and lie packed along the channels, several to a
byte, the first in its lowest bits. Ties go to the even code.

e4m3 is read and written by its bits here, since neither an A100 nor an MI300 converts it: its four bits of exponent and three of fraction
are those of a float16 whose exponent is eight less, so that the number is that float16 times 256.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from mmsdk.kernels._triton import jit, tl

__all__ = ["LEVELS", "Codes", "decode", "e4m3_of", "encode", "from_e4m3", "nearest", "pack", "plain", "scale_dtype", "unpack"]

# Bits of a code.
LEVELS: Mapping[str, int] = MappingProxyType({"fp8": 8, "int8": 8, "int4": 4, "int2": 2})

_E4M3 = 448.0


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes packed along the channels, and the scale and the minimum of each group."""

    codes: UInt8[Tensor, "*n p"]
    scale: Float[Tensor, "*m"]
    low: Float[Tensor, "*m"]

    def at(self, index: Int[Tensor, "*k"] | int | slice) -> "Codes":
        """Some of them, along the first axis."""
        return Codes(self.codes[index], self.scale[index], self.low[index])


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """What scales are stored in: float16, whose eleven bits are enough for any code, beside half-size numbers, else float32."""
    return torch.float32 if dtype in (torch.float32, torch.float64) else torch.float16


def encode(x: Float[Tensor, "*n d"], dim: int, bits: str) -> Codes:
    """Codes of x by one of the names of `LEVELS`, grouped along `dim`, which the scales keep with size 1."""
    wide, stored = x.float(), scale_dtype(x.dtype)
    most = torch.finfo(stored).max
    if bits == "fp8":
        scale = _stored(wide.abs().amax(dim, keepdim=True) / _E4M3, stored, most)
        codes = (wide / scale.float()).clamp(-_E4M3, _E4M3).to(torch.float8_e4m3fn).view(torch.uint8)
        return Codes(codes, scale, torch.zeros_like(scale))
    steps = 2 ** LEVELS[bits] - 1
    least = wide.amin(dim, keepdim=True)
    low = least.clamp(-most, most).to(stored)
    scale = _stored((wide.amax(dim, keepdim=True) - torch.minimum(least, low.float())) / steps, stored, most)
    codes = ((wide - low.float()) / scale.float()).round().clamp(0, steps).to(torch.uint8)
    return Codes(pack(codes, LEVELS[bits]), scale, low)


def decode(found: Codes, bits: str, width: int, dtype: torch.dtype) -> Float[Tensor, "*n d"]:
    """The numbers again, `width` channels in a dtype."""
    if bits == "fp8":
        return (found.codes.view(torch.float8_e4m3fn).float() * found.scale.float()).to(dtype)
    codes = unpack(found.codes, LEVELS[bits])[..., :width]
    return torch.addcmul(found.low.float(), codes.float(), found.scale.float()).to(dtype)


def pack(codes: UInt8[Tensor, "*n d"], bits: int) -> UInt8[Tensor, "*n p"]:
    """Several codes to a byte, the first in the lowest bits; a width that is no multiple is filled up."""
    each = 8 // bits
    if each == 1:
        return codes
    filled = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % each)).unflatten(-1, (-1, each))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    packed: Tensor = (filled << shifts).sum(-1, dtype=torch.uint8)
    return packed


def unpack(codes: UInt8[Tensor, "*n p"], bits: int) -> UInt8[Tensor, "*n d"]:
    """The codes that `pack` took, and what it filled up with."""
    if bits == 8:
        return codes
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    unpacked: Tensor = ((codes[..., None] >> shifts) & (2**bits - 1)).flatten(-2)
    return unpacked


def _stored(scale: Tensor, stored: torch.dtype, most: float) -> Tensor:
    """A scale as it is stored: no smaller than it was, if it can be stored, so that the largest number has a code; 1 for equal numbers."""
    # beyond the largest number of that kind there is nothing to step up to, but infinity
    scale = scale.clamp(max=most)
    near = scale.to(stored)
    # One step up, which 2^-10 of a float16 is at least; of a float32 nothing was rounded.
    up = torch.where(near.float() < scale, (near.float() * (1 + 2**-10)).clamp(max=most).to(stored), near)
    return torch.where(up > 0, up, torch.ones_like(up))


@jit
def plain(code: tl.tensor, fp8: tl.constexpr, inner: tl.constexpr) -> tl.tensor:
    """Codes that are unpacked already as numbers of a dtype, which holds them exactly, to be scaled by whoever reads them."""
    number = from_e4m3(code) if fp8 else code.to(tl.float32)
    if inner == tl.bfloat16:
        # the upper half of it, as nothing has to be rounded
        number = (number.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return number.to(inner)


@jit
def from_e4m3(code: tl.tensor) -> tl.tensor:
    """The float32 numbers of bytes that are e4m3."""
    byte = code.to(tl.uint16)
    half = (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@jit
def e4m3_of(x: tl.tensor) -> tl.tensor:
    """The bytes of float32 numbers from -448 to 448, ties to the even one."""
    whole = x.to(tl.uint32, bitcast=True)
    size = whole & 0x7FFFFFFF
    # three bits of the fraction stay; what carries over raises the exponent, as it should
    rounded = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^-6 all are multiples of 2^-9
    small = nearest(tl.abs(x) * 512.0).to(tl.uint32)
    return (((whole >> 24) & 0x80) | tl.where(size < 0x3C800000, small, rounded)).to(tl.uint8)


@jit
def nearest(x: tl.tensor) -> tl.tensor:
    """The nearest whole number, ties to the even one, of float32 numbers below 2^22."""
    # what is added leaves no bit for a fraction, and is taken off again
    return (x + 12582912.0) - 12582912.0
