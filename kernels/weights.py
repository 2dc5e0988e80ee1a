"""Matrices of int8 and int4 weights as kernels read them, and what a product with one is: shared by the kernels of one row and of several.

    y[m, n] = sum_k x[m, k] (scale[n, k // size] code[n, k] + offset[n, k // size])

Codes are grouped along k, `size` = k / groups of them under one scale. int8 codes are signed and have no offsets. int4 codes run from 0 to
15, two to a byte: code 2 i in the low half, code 2 i + 1 in the high one. That covers scale (code - 8) (GGUF's Q4_0, offset = -8 scale),
scale code + minimum (Q4_1) and the zero points of GPTQ and AWQ.
"""

import torch
from jaxtyping import UInt8
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels.case import Arguments, Case, Result, normal

__all__ = ["case", "checked", "pack", "unpack", "weighted"]


def pack(codes: UInt8[Tensor, "*n k"]) -> UInt8[Tensor, "*n half"]:
    """Codes 0 to 15, k even, two to a byte."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(packed: UInt8[Tensor, "*n half"]) -> UInt8[Tensor, "*n k"]:
    """The codes that `pack` took."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def checked(x: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor | None) -> None:
    """Raise InputError for what does not fit together."""
    k = codes.shape[1] if offsets is None else 2 * codes.shape[1]
    if x.shape[1] != k:
        raise InputError(f"rows of {x.shape[1]} numbers meet rows of {k} codes", item="x")
    size, rest = divmod(k, scales.shape[1])
    if rest or (offsets is not None and size % 2):
        raise InputError(f"{scales.shape[1]} groups do not share {k} codes evenly", item="scales")


def weighted(x: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor | None) -> Result:
    """The product, float32 inside: what kernels are held to."""
    grouped = (codes if offsets is None else unpack(codes)).float().unflatten(1, (scales.shape[1], -1))
    weight = grouped * scales.float()[..., None]
    weight = weight if offsets is None else weight + offsets.float()[..., None]
    return ((x.float() @ weight.flatten(1).T).to(x.dtype),)


def case(name: str, m: int, n: int, k: int, groups: int, halves: bool, fused: bool = False) -> Case:
    """Of a kernel for such products: scales such that the results are of the size of x, and, `fused`, rows of x within wider ones."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        x = normal(generator, dtype, m, 2 * k)[:, :k] if fused else normal(generator, dtype, m, k)
        scales = (torch.rand(n, groups, generator=generator) + 0.5) * k**-0.5
        if halves:
            codes = pack(torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8))
            return x, codes, scales / 8, scales * torch.rand(n, groups, generator=generator) - scales
        return x, torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8), scales / 64, None

    return Case(name, make)
