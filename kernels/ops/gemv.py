"""A row times a matrix whose weights are int8 or int4: a decode step reads every weight once, so their bytes are its time.

    y[m, n] = sum_k x[m, k] (scale[n, k // size] code[n, k] + offset[n, k // size])

Codes are as in `mmsdk.kernels.weights`. Sums are float32; weights are never written out in a wider type.

Each row of x reads the codes anew. Several at a time go by tiles that read them once (`mmsdk.kernels.ops.small_gemm`).
"""

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor

from mmsdk.kernels._triton import jit, launchable, tl
from mmsdk.kernels.case import Launch, Op, Plan
from mmsdk.kernels.weights import case, checked, weighted

__all__ = ["OP", "gemv_int4", "gemv_int8"]

_OUTPUTS, _CODES = 8, 256


def gemv_int8(x: Float[Tensor, "m k"], codes: Int8[Tensor, "n k"], scales: Float[Tensor, "n groups"]) -> Float[Tensor, "m n"]:
    """x times the transposed int8 matrix. Raises InputError where the groups do not divide k."""
    checked(x, codes, scales, None)
    return (_plan(x, codes, scales, None).run() if launchable(x) else weighted(x, codes, scales, None))[0]


def gemv_int4(
    x: Float[Tensor, "m k"], packed: UInt8[Tensor, "n half"], scales: Float[Tensor, "n groups"], offsets: Float[Tensor, "n groups"]
) -> Float[Tensor, "m n"]:
    """x times the transposed int4 matrix, k even. Raises InputError where the groups do not divide k into even sizes."""
    checked(x, packed, scales, offsets)
    return (_plan(x, packed, scales, offsets).run() if launchable(x) else weighted(x, packed, scales, offsets))[0]


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


OP = Op(
    weighted,
    _plan,
    cases=(
        case("int8, one number", 1, 1, 1, 1, halves=False),
        case("int8, 7 x 63, groups of 9", 7, 5, 63, 7, halves=False),
        case("int8, two tiles, one scale a row", 1, 18, 576, 1, halves=False),
        case("int4, one pair", 1, 1, 2, 1, halves=True),
        case("int4, groups of 32", 2, 17, 96, 3, halves=True),
        case("int4, two tiles", 1, 3, 1152, 9, halves=True),
    ),
    builds=(
        case("int4, 4096 x 4096, groups of 32", 1, 4096, 4096, 128, halves=True),
        case("int8, 4096 x 4096, one scale a row", 1, 4096, 4096, 1, halves=False),
    ),
)
