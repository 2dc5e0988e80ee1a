"""TurboQuant's rounding (arXiv 2504.19874), the form for mean squared error: rotate, then round each channel by one fixed table.

    y = R x / |x|,   code_i = the nearest of the table's centroids to y_i,   x is about |x| R^T centroid[code]

A random rotation R spreads whatever is large over all d channels, after which each of them is nearly normal with variance 1/d whatever x
was, so that one table serves all: the centroids of Lloyd and Max for the normal distribution (Max 1960), whose errors are 0.363, 0.117,
0.0345 and 0.0095 of |x|^2 for one to four bits. Nothing is learned, no token's codes depend on another's, and besides the codes a token
has one number, its length.

[published] rotation, table and length. [ours] the rotation is the Q of a fixed random matrix; keys are rounded in this form too, without
the further bit for the residual that makes inner products unbiased.

A rotation changes no product of two vectors that it turns both: a kernel that reads such codes turns the query, R q, instead of every key,
and turns the mixture of values back, R^T o, instead of every value.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mmsdk.kernels._triton import accumulable, jit, power, tl
from mmsdk.kernels.case import Launch

__all__ = ["TURBO", "centroids", "level_of", "restored", "rotated", "rotation", "rounded", "turn", "turn_back"]

# Bits of a code, by what the kinds are called.
TURBO: Mapping[str, int] = MappingProxyType({"turbo4": 4, "turbo2": 2})
# Vectors that a program turns, and channels of them at a time.
_ROWS, _STEP = 16, 16

# The positive halves of the tables for a variance of 1.
_HALVES = {
    1: (0.7979,),
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
}


def centroids(bits: int) -> Float[Tensor, " levels"]:
    """The 2^bits values that stand for normal numbers of variance 1, ascending; for one to four bits."""
    half = torch.tensor(_HALVES[bits], device="cpu")
    return torch.cat((-half.flip(0), half))


@cache
def rotation(width: int) -> Float[Tensor, "d d"]:
    """The same random rotation always, for so many channels."""
    drawn = torch.randn(width, width, generator=torch.Generator("cpu").manual_seed(width), dtype=torch.float64, device="cpu")
    turned: Tensor = torch.linalg.qr(drawn)[0]
    return turned.float()


def rotated(x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
    """R x of every vector."""
    return x.float() @ rotation(x.shape[-1]).to(x.device).T


def rounded(x: Float[Tensor, "*n d"], bits: int) -> tuple[UInt8[Tensor, "*n d"], Float[Tensor, "*n 1"]]:
    """The codes and the lengths of vectors."""
    wide, d = x.float(), x.shape[-1]
    lengths = wide.norm(dim=-1, keepdim=True)
    spread = rotated(wide / lengths.clamp_min(torch.finfo(torch.float32).tiny)) * d**0.5
    table = centroids(bits).to(x.device)
    return torch.bucketize(spread, (table[1:] + table[:-1]) / 2).to(torch.uint8), lengths


def restored(codes: UInt8[Tensor, "*n d"], lengths: Float[Tensor, "*n 1"], bits: int) -> Float[Tensor, "*n d"]:
    """The vectors that codes and lengths stand for."""
    d = codes.shape[-1]
    turned = centroids(bits).to(codes.device)[codes.long()] @ rotation(d).to(codes.device)
    found: Tensor = turned * (lengths.float() * d**-0.5)
    return found


def turn(x: Float[Tensor, "b h d"], by: Float[Tensor, "d d"]) -> tuple[Float[Tensor, "2 b h d"], Launch]:
    """A copy of x, behind it where R x / sqrt(d) of every vector goes, and the launch that brings it there."""
    both = torch.empty(2, *x.shape, dtype=x.dtype, device=x.device)
    both[0] = x
    return both, _launch(both[0].flatten(0, 1)[:, None], both[1].flatten(0, 1)[:, None], by, x.dtype, back=False)


def turn_back(parts: Float[Tensor, "n p d"], by: Float[Tensor, "d d"], dtype: torch.dtype) -> Launch:
    """What turns vectors back in place and divides them, R^T o / sqrt(d), multiplied as numbers of a dtype are."""
    return _launch(parts, parts, by, dtype, back=True)


def _launch(x: Float[Tensor, "n p d"], out: Float[Tensor, "n p d"], by: Float[Tensor, "d d"], dtype: torch.dtype, back: bool) -> Launch:
    n, p, d = x.shape
    arguments: dict[str, Tensor | int | float] = {"x": x, "by": by.contiguous(), "out": out, "rows": n * p, "near_rows": p, "gain": d**-0.5}
    assert x.stride() == out.stride(), "both lie alike"
    arguments |= {"far": x.stride(0), "near": x.stride(1)}
    constants = {"d": d, "back": back, "inner": accumulable(dtype), "many": _ROWS, "block": max(power(d), 16), "step": _STEP}
    return Launch(_turn, (-(-n * p // _ROWS),), arguments, constants)


@jit
def _turn(
    x: tl.tensor,
    by: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    near_rows: tl.tensor,
    gain: tl.tensor,
    far: tl.tensor,
    near: tl.tensor,
    d: tl.constexpr,
    back: tl.constexpr,
    inner: tl.constexpr,
    many: tl.constexpr,
    block: tl.constexpr,
    step: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * many + tl.arange(0, many)).to(tl.int64)
    here = (row < rows)[:, None]
    channel = tl.arange(0, block)
    narrow = channel < d
    place = (row // near_rows * far + row % near_rows * near)[:, None]
    found = tl.load(x + place + channel[None, :], mask=here & narrow[None, :], other=0.0).to(inner)
    # out may be x: all of it is read before any of it is written
    tl.debug_barrier()
    for at in range(0, d, step):
        wide = at + tl.arange(0, step)
        by_at = channel[:, None] * d + wide[None, :] if back else wide[None, :] * d + channel[:, None]
        part = tl.load(by + by_at, mask=narrow[:, None] & (wide < d)[None, :], other=0.0).to(inner)
        turned = tl.dot(found, part, input_precision="ieee") * gain
        tl.store(out + place + wide[None, :], turned.to(out.dtype.element_ty), mask=here & (wide < d)[None, :])


@jit
def level_of(code: tl.tensor, bits: tl.constexpr) -> tl.tensor:
    """The centroids of codes of four or two bits, float32.

    Their sizes stand in a word, in ten thousandths, 16 bits each, and are shifted out of it: that takes no memory and few conditions, each
    of which would be a register of its own on an AMD GPU.
    """
    above = code.to(tl.uint32) >> (bits - 1)
    # how far from the middle: below it the bits are turned
    place = (code.to(tl.uint32) ^ (above - 1)) & ((1 << (bits - 1)) - 1)
    if bits == 4:
        word = tl.where((place & 4) == 0, 0x24D019A80F290504, 0x6ABE50D23F353112)
        size = (word >> ((place & 3) * 16).to(tl.int64)) & 0xFFFF
    else:
        size = (0x3B0011B0 >> (place * 16).to(tl.int32)) & 0xFFFF
    sized = size.to(tl.int32).to(tl.float32) * 1e-4
    return (sized.to(tl.uint32, bitcast=True) | ((1 - above) << 31)).to(tl.float32, bitcast=True)
