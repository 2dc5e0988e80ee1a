"""Keys and values in fewer bits (KIVI, arXiv 2402.02750): keys per channel over a block of tokens, values per token over its channels.

    scale = (max - min) / (2^b - 1),   code = round((x - min) / scale),   x is about min + code * scale

Keys have channels that are large for every token, so that a channel is the group in which they are alike; values have none. No error
exceeds scale / 2. Each group is scaled by itself alone: nothing is learned from what came before. e4m3 is the same with a scale of
max |x| / 448 and no minimum: of a channel that is large for every token it keeps less than int8 does.

KIVI's groups of keys are 32 tokens; ours are the blocks, which are as long. KIVI's values are grouped by 32 channels, ours by the head.
The kinds called turbo are TurboQuant's instead (`mmsdk.kv.turbo`): each token by itself, keys like values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mmsdk.kv.turbo import restored, rounded

__all__ = ["Bits", "Codes", "decode", "encode", "group", "names", "per_value", "scale_dtype"]

Bits = Literal["fp8", "int8", "int4", "int2", "turbo4", "turbo2"]

_LEVELS: Mapping[str, int] = MappingProxyType({"int8": 8, "int4": 4, "int2": 2, "turbo4": 4, "turbo2": 2})
_E4M3 = 448.0


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes packed along the channels, and the scale and the minimum of each group."""

    codes: UInt8[Tensor, "*n p"]
    scale: Float[Tensor, "*m"]
    low: Float[Tensor, "*m"]


def names() -> tuple[Bits, ...]:
    """The kinds that there are."""
    return get_args(Bits)


def per_value(bits: Bits) -> int:
    """Bits of a code."""
    return _LEVELS.get(bits, 8)


def group(bits: Bits, dim: int, channels: int) -> int:
    """The axis along which numbers share a scale: `dim`, or the channels where a token is rounded by itself."""
    return channels if bits.startswith("turbo") else dim


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """What scales are stored in: float16, whose eleven bits are enough for any code, beside half-size numbers, else float32."""
    return torch.float32 if dtype in (torch.float32, torch.float64) else torch.float16


def encode(x: Float[Tensor, "*n d"], dim: int, bits: Bits) -> Codes:
    """Codes of x, grouped along `dim` (which the scales keep, with size 1). Rounded with the scales as they are stored."""
    wide, stored = x.float(), scale_dtype(x.dtype)
    most = torch.finfo(stored).max
    if bits == "fp8":
        scale = _stored(wide.abs().amax(dim, keepdim=True) / _E4M3, stored, most)
        codes = (wide / scale.float()).clamp(-_E4M3, _E4M3).to(torch.float8_e4m3fn).view(torch.uint8)
        return Codes(codes, scale, torch.zeros_like(scale))
    if bits.startswith("turbo"):
        codes, lengths = rounded(x, per_value(bits))
        scale = lengths.clamp(max=most).to(stored)
        return Codes(_packed(codes, per_value(bits)), scale, torch.zeros_like(scale))
    steps = 2 ** per_value(bits) - 1
    least = wide.amin(dim, keepdim=True)
    low = least.clamp(-most, most).to(stored)
    scale = _stored((wide.amax(dim, keepdim=True) - torch.minimum(least, low.float())) / steps, stored, most)
    codes = ((wide - low.float()) / scale.float()).round().clamp(0, steps).to(torch.uint8)
    return Codes(_packed(codes, per_value(bits)), scale, low)


def decode(found: Codes, bits: Bits, width: int, dtype: torch.dtype) -> Float[Tensor, "*n d"]:
    """The numbers again, `width` channels in a dtype."""
    if bits == "fp8":
        return (found.codes.view(torch.float8_e4m3fn).float() * found.scale.float()).to(dtype)
    codes = _unpacked(found.codes, per_value(bits))[..., :width]
    if bits.startswith("turbo"):
        return restored(codes, found.scale, per_value(bits)).to(dtype)
    return torch.addcmul(found.low.float(), codes.float(), found.scale.float()).to(dtype)


def _stored(scale: Tensor, stored: torch.dtype, most: float) -> Tensor:
    """A scale as it is stored: no smaller than it was, so that the largest number still has a code, and 1 for a group of equal numbers."""
    near = scale.clamp(max=most).to(stored)
    # One step up, which 2^-10 of a float16 is at least; of a float32 nothing was rounded.
    up = torch.where(near.float() < scale, (near.float() * (1 + 2**-10)).to(stored), near)
    return torch.where(up > 0, up, torch.ones_like(up))


def _packed(codes: UInt8[Tensor, "*n d"], bits: int) -> UInt8[Tensor, "*n p"]:
    """Several codes to a byte, the first in the lowest bits; a width that is no multiple is filled up."""
    each = 8 // bits
    if each == 1:
        return codes
    filled = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % each)).unflatten(-1, (-1, each))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    packed: Tensor = (filled << shifts).sum(-1, dtype=torch.uint8)
    return packed


def _unpacked(codes: UInt8[Tensor, "*n p"], bits: int) -> UInt8[Tensor, "*n d"]:
    if bits == 8:
        return codes
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    unpacked: Tensor = ((codes[..., None] >> shifts) & (2**bits - 1)).flatten(-2)
    return unpacked
