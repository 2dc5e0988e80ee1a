"""Keys and values in fewer bits (KIVI, arXiv 2402.02750): keys per channel over a block of tokens, values per token over its channels.

    scale = (max - min) / (2^b - 1),   code = round((x - min) / scale),   x is about min + code * scale

Keys have channels that are large for every token, so that a channel is the group in which they are alike; values have none. No error
exceeds scale / 2. Each group is scaled by itself alone: nothing is learned from what came before. e4m3 is the same with a scale of
max |x| / 448 and no minimum: of a channel that is large for every token it keeps less than int8 does. The arithmetic is in
`mmsdk.kernels.rounding`, where kernels find it too.

KIVI's groups of keys are 32 tokens; ours are the blocks, which are as long. KIVI's values are grouped by 32 channels, ours by the head.
The kinds called turbo are TurboQuant's instead (`mmsdk.kernels.turbo`): each token by itself, keys like values.
"""

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.kernels import rounding
from mmsdk.kernels.older import KINDS, numbers
from mmsdk.kernels.rounding import LEVELS, Codes, pack, scale_dtype
from mmsdk.kernels.turbo import rounded

__all__ = ["Bits", "Codes", "decode", "encode", "group", "names", "per_value", "scale_dtype"]

Bits = Literal["fp8", "int8", "int4", "int2", "turbo4", "turbo2"]


def names() -> tuple[Bits, ...]:
    """The kinds that there are."""
    return get_args(Bits)


def per_value(bits: Bits) -> int:
    """Bits of a code."""
    return KINDS[bits]


def group(bits: Bits, dim: int, channels: int) -> int:
    """The axis along which numbers share a scale: `dim`, or the channels where a token is rounded by itself."""
    return channels if bits.startswith("turbo") else dim


def encode(x: Float[Tensor, "*n d"], dim: int, bits: Bits) -> Codes:
    """Codes of x, grouped along `dim` (which the scales keep, with size 1). Rounded with the scales as they are stored."""
    if bits in LEVELS:
        return rounding.encode(x, dim, bits)
    codes, lengths = rounded(x, per_value(bits))
    stored = scale_dtype(x.dtype)
    scale = lengths.clamp(max=torch.finfo(stored).max).to(stored)
    return Codes(pack(codes, per_value(bits)), scale, torch.zeros_like(scale))


def decode(found: Codes, bits: Bits, width: int, dtype: torch.dtype) -> Float[Tensor, "*n d"]:
    """The numbers again, `width` channels in a dtype."""
    return numbers(found, bits, width, dtype)
