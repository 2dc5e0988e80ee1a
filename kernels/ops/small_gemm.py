"""Several rows times a matrix whose weights are int8 or int4, by tiles: up to 64 rows read every code once.

    y[m, n] = sum_k x[m, k] (scale[n, k // size] code[n, k] + offset[n, k // size])

Codes, groups and the packing of int4 are those of `mmsdk.kernels.weights`; a single row is `gemv`'s. A program takes some rows of the
matrix and up to 64 of x. Codes become numbers of the dtype of x in registers and meet x in a matrix product with float32 sums; weights are
never written out. A scale that a whole row shares is multiplied behind the sum, with codes as they are, which every dtype holds exactly.
"""

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor

from mmsdk.kernels._triton import accumulable, jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, distant, normal
from mmsdk.kernels.weights import case, checked, weighted

__all__ = ["OP", "small_gemm_int4", "small_gemm_int8"]

# Rows of x that a program takes at most, rows of the matrix, and codes of a step along them, in float32 fewer.
_MOST, _OUTPUTS, _DEPTH, _DEPTH32 = 64, 32, 128, 32


def small_gemm_int8(x: Float[Tensor, "m k"], codes: Int8[Tensor, "n k"], scales: Float[Tensor, "n groups"]) -> Float[Tensor, "m n"]:
    """x times the transposed int8 matrix. Raises InputError where the groups do not divide k."""
    checked(x, codes, scales, None)
    return (_plan(x, codes, scales, None).run() if launchable(x) else weighted(x, codes, scales, None))[0]


def small_gemm_int4(
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
    depth, rows = _DEPTH32 if x.dtype == torch.float32 else _DEPTH, max(min(power(m), _MOST), 16)
    arguments: dict[str, Tensor | int | float] = {
        "x": x,
        "codes": codes.contiguous(),
        "scales": scales,
        "offsets": scales if offsets is None else offsets.contiguous(),
        "out": out,
        "x_row": x.stride(0),
        "m": m,
        "n": n,
        "k": k,
        "groups": groups,
        "size": k // groups,
    }
    constants = {
        "halves": offsets is not None,
        "late": groups == 1 and offsets is None,
        "each": _each(depth, groups, k // groups),
        "rows": rows,
        "outputs": _OUTPUTS,
        "depth": depth,
        "inner": accumulable(x.dtype),
    }
    # the programs that read the same codes run side by side and find them in the cache
    tiles = arguments["tiles"] = -(-m // rows)
    launch = Launch(_kernel, (tiles * -(-n // _OUTPUTS),), arguments, constants)
    return Plan((out,), (launch,) if m and n else ())


def _each(depth: int, groups: int, size: int) -> int:
    """How many groups a step meets, whole ones or parts of a single one; 0 where they begin and end anywhere within it."""
    if groups == 1 or size % depth == 0:
        return 1
    return depth // size if depth % size == 0 else 0


@jit
def _kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    out: tl.tensor,
    x_row: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    groups: tl.tensor,
    size: tl.tensor,
    tiles: tl.tensor,
    halves: tl.constexpr,
    late: tl.constexpr,
    each: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    depth: tl.constexpr,
    inner: tl.constexpr,
) -> None:
    row = (tl.program_id(0) % tiles * rows + tl.arange(0, rows)).to(tl.int64)
    output = (tl.program_id(0) // tiles * outputs + tl.arange(0, outputs)).to(tl.int64)
    here = (row < m)[:, None]
    live = (output < n)[:, None]
    sums = tl.zeros([rows, outputs], tl.float32)
    base = output * groups
    if halves:
        half: tl.constexpr = depth // 2
        line = codes + output[:, None] * (k // 2)
        for at in range(0, k, depth):
            pair = at // 2 + tl.arange(0, half)
            packed = tl.load(line + pair[None, :], mask=live & (2 * pair < k)[None, :], other=0)
            scale = _spread(scales, base, live, 2 * pair, at, groups, size, k, each, outputs, half)
            offset = _spread(offsets, base, live, 2 * pair, at, groups, size, k, each, outputs, half)
            column = at + tl.arange(0, depth)
            part = tl.load(x + row[:, None] * x_row + column[None, :], mask=here & (column < k)[None, :], other=0.0).to(inner)
            even, odd = tl.split(tl.reshape(part, (rows, half, 2)))
            low = ((packed & 15).to(tl.float32) * scale + offset).to(inner)
            high = ((packed >> 4).to(tl.float32) * scale + offset).to(inner)
            sums += tl.dot(even, tl.trans(low), input_precision="ieee")
            sums += tl.dot(odd, tl.trans(high), input_precision="ieee")
    else:
        for at in range(0, k, depth):
            column = at + tl.arange(0, depth)
            inside = (column < k)[None, :]
            weight = tl.load(codes + output[:, None] * k + column[None, :], mask=live & inside, other=0).to(tl.float32)
            if not late:
                weight = weight * _spread(scales, base, live, column, at, groups, size, k, each, outputs, depth)
            part = tl.load(x + row[:, None] * x_row + column[None, :], mask=here & inside, other=0.0).to(inner)
            sums += tl.dot(part, tl.trans(weight.to(inner)), input_precision="ieee")
    if late:
        sums = sums * tl.load(scales + output, mask=output < n, other=0.0).to(tl.float32)[None, :]
    at_out = out + row[:, None] * n + output[None, :]
    tl.store(at_out, sums.to(out.dtype.element_ty), mask=here & (output < n)[None, :])


@jit
def _spread(
    source: tl.tensor,
    base: tl.tensor,
    live: tl.tensor,
    column: tl.tensor,
    at: tl.tensor,
    groups: tl.tensor,
    size: tl.tensor,
    k: tl.tensor,
    each: tl.constexpr,
    outputs: tl.constexpr,
    width: tl.constexpr,
) -> tl.tensor:
    """The scales, or the offsets, of a step's codes: read once a group where groups are whole in it."""
    if each == 0:
        found = tl.load(source + base[:, None] + (column // size)[None, :], mask=live & (column < k)[None, :], other=0.0).to(tl.float32)
    else:
        group = at // size + tl.arange(0, each)
        few = tl.load(source + base[:, None] + group[None, :], mask=live & (group < groups)[None, :], other=0.0).to(tl.float32)
        found = tl.reshape(tl.broadcast_to(few[:, :, None], (outputs, each, width // each)), (outputs, width))
    return found


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: rows of x that 32-bit offsets cannot reach."""
    codes = torch.randint(-127, 128, (3, 40), generator=generator, dtype=torch.int8)
    return distant(normal(generator, dtype, 2, 40)), codes, torch.full((3, 5), 2**-9), None


OP = Op(
    weighted,
    _plan,
    cases=(
        case("int8, one number", 1, 1, 1, 1, halves=False),
        case("int8, 7 x 63, groups of 9", 7, 5, 63, 7, halves=False),
        case("int8, one scale a row, rows apart", 3, 33, 200, 1, halves=False, fused=True),
        case("int8, groups of 64, two tiles of rows", 65, 5, 192, 3, halves=False),
        case("int4, one pair", 2, 1, 2, 1, halves=True),
        case("int4, groups of 32", 17, 40, 288, 9, halves=True),
        case("int4, groups of 256", 2, 7, 512, 2, halves=True),
        case("int4, groups of 6", 4, 3, 66, 11, halves=True),
        Case("offsets beyond 2**31", _distant),
        case("no rows", 0, 4, 8, 1, halves=False),
    ),
    builds=(
        case("int4, 16 rows, 4096 x 4096, groups of 32", 16, 4096, 4096, 128, halves=True),
        case("int4, 64 rows, 4096 x 4096, groups of 128", 64, 4096, 4096, 32, halves=True),
        case("int8, 64 rows, 4096 x 4096, one scale a row", 64, 4096, 4096, 1, halves=False),
        case("int8, 16 rows, 4096 x 4096, groups of 32", 16, 4096, 4096, 128, halves=False),
    ),
)
