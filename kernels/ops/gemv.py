"""A few rows times a matrix whose weights are int8 or int4: a decode step reads every weight once, so their bytes are its time.

    y[m, n] = sum_k x[m, k] (scale[n, k // size] code[n, k] + offset[n, k // size])

Codes are grouped along k, `size` = k / groups of them under one scale. int8 codes are signed and have no offsets. int4 codes run from 0 to
15, two to a byte: code 2 i in the low half, code 2 i + 1 in the high one. That covers scale (code - 8) (GGUF's Q4_0, offset = -8 scale),
scale code + minimum (Q4_1) and the zero points of GPTQ and AWQ. Sums are float32; weights are never written out in a wider type.
"""

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import jit, launchable, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, normal

__all__ = ["OP", "gemv_int4", "gemv_int8", "pack", "unpack"]

_OUTPUTS, _CODES = 8, 256


def gemv_int8(x: Float[Tensor, "m k"], codes: Int8[Tensor, "n k"], scales: Float[Tensor, "n groups"]) -> Float[Tensor, "m n"]:
    """x times the transposed int8 matrix. Raises InputError where the groups do not divide k."""
    return _computed(x, codes, scales, None)


def gemv_int4(
    x: Float[Tensor, "m k"], packed: UInt8[Tensor, "n half"], scales: Float[Tensor, "n groups"], offsets: Float[Tensor, "n groups"]
) -> Float[Tensor, "m n"]:
    """x times the transposed int4 matrix, k even. Raises InputError where the groups do not divide k into even sizes."""
    return _computed(x, packed, scales, offsets)


def pack(codes: UInt8[Tensor, "*n k"]) -> UInt8[Tensor, "*n half"]:
    """Codes 0 to 15, k even, two to a byte."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(packed: UInt8[Tensor, "*n half"]) -> UInt8[Tensor, "*n k"]:
    """The codes that `pack` took."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _computed(x: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor | None) -> Tensor:
    k = codes.shape[1] if offsets is None else 2 * codes.shape[1]
    if x.shape[1] != k:
        raise InputError(f"rows of {x.shape[1]} numbers meet rows of {k} codes", item="x")
    size, rest = divmod(k, scales.shape[1])
    if rest or (offsets is not None and size % 2):
        raise InputError(f"{scales.shape[1]} groups do not share {k} codes evenly", item="scales")
    return (_plan(x, codes, scales, offsets).run() if launchable(x) else _reference(x, codes, scales, offsets))[0]


def _reference(x: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor | None) -> Result:
    grouped = (codes if offsets is None else unpack(codes)).float().unflatten(1, (scales.shape[1], -1))
    weight = grouped * scales.float()[..., None]
    weight = weight if offsets is None else weight + offsets.float()[..., None]
    return ((x.float() @ weight.flatten(1).T).to(x.dtype),)


def _plan(x: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor | None) -> Plan:
    m, k = x.shape
    n, groups = scales.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    scales = scales.contiguous()
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    arguments: dict[str, Tensor | int | float] = {
        "x": x,
        "codes": codes.contiguous(),
        "scales": scales,
        "offsets": scales if offsets is None else offsets.contiguous(),
        "out": out,
        "x_row": x.stride(0),
        "n": n,
        "k": k,
        "groups": groups,
        "size": k // groups,
    }
    constants = {"halves": offsets is not None, "outputs": _OUTPUTS, "many": _CODES}
    # rows first: those that read the same weights run side by side and find them in the cache
    return Plan((out,), (Launch(_kernel, (m, -(-n // _OUTPUTS)), arguments, constants),))


@jit
def _kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    out: tl.tensor,
    x_row: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    groups: tl.tensor,
    size: tl.tensor,
    halves: tl.constexpr,
    outputs: tl.constexpr,
    many: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    output = (tl.program_id(1) * outputs + tl.arange(0, outputs)).to(tl.int64)
    live = (output < n)[:, None]
    sums = tl.zeros([outputs, many], tl.float32)
    if halves:
        bytes_in_row = k // 2
        for at in range(0, bytes_in_row, many):
            pair = at + tl.arange(0, many)
            inside = pair < bytes_in_row
            mask = live & inside[None, :]
            packed = tl.load(codes + output[:, None] * bytes_in_row + pair[None, :], mask=mask, other=0)
            group = output[:, None] * groups + (2 * pair // size)[None, :]
            scale = tl.load(scales + group, mask=mask, other=0.0).to(tl.float32)
            offset = tl.load(offsets + group, mask=mask, other=0.0).to(tl.float32)
            even = tl.load(x + row * x_row + 2 * pair, mask=inside, other=0.0).to(tl.float32)[None, :]
            odd = tl.load(x + row * x_row + 2 * pair + 1, mask=inside, other=0.0).to(tl.float32)[None, :]
            low = (packed & 15).to(tl.float32)
            high = (packed >> 4).to(tl.float32)
            sums += scale * (low * even + high * odd) + offset * (even + odd)
    else:
        for at in range(0, k, many):
            column = at + tl.arange(0, many)
            inside = column < k
            mask = live & inside[None, :]
            code = tl.load(codes + output[:, None] * k + column[None, :], mask=mask, other=0).to(tl.float32)
            scale = tl.load(scales + output[:, None] * groups + (column // size)[None, :], mask=mask, other=0.0).to(tl.float32)
            part = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
            sums += scale * code * part[None, :]
    value = tl.sum(sums, 1).to(out.dtype.element_ty)
    tl.store(out + row * n + output, value, mask=output < n)


def _case(name: str, m: int, n: int, k: int, groups: int, halves: bool) -> Case:
    """Scales such that the results are of the size of x."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        x = normal(generator, dtype, m, k)
        scales = (torch.rand(n, groups, generator=generator) + 0.5) * k**-0.5
        if halves:
            codes = pack(torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8))
            return x, codes, scales / 8, scales * torch.rand(n, groups, generator=generator) - scales
        return x, torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8), scales / 64, None

    return Case(name, make)


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("int8, one number", 1, 1, 1, 1, halves=False),
        _case("int8, 7 x 63, groups of 9", 7, 5, 63, 7, halves=False),
        _case("int8, two tiles, one scale a row", 1, 18, 576, 1, halves=False),
        _case("int4, one pair", 1, 1, 2, 1, halves=True),
        _case("int4, groups of 32", 2, 17, 96, 3, halves=True),
        _case("int4, two tiles", 1, 3, 1152, 9, halves=True),
    ),
    builds=(
        _case("int4, 4096 x 4096, groups of 32", 1, 4096, 4096, 128, halves=True),
        _case("int8, 4096 x 4096, one scale a row", 1, 4096, 4096, 1, halves=False),
    ),
)
