"""Large matrices as the C++ reads them, and their products with a few rows.

    matrix = int4(*laid_out(codes, scales, zeros), columns=k, group=32)
    out = product(matrix, x)            # [m, n], float32; sums go in the same order however many rows there are

Rows are bfloat16. A matrix keeps what it points to alive. All of it needs `library().functions`.
"""

import ctypes
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int8, Int16, UInt8
from torch import Tensor

from mmsdk.kernels.cpu.library import library

__all__ = ["TILE", "Matrix", "MatrixFields", "codes_of", "int4", "int8", "laid_out", "product", "wide", "written_out"]

# Rows of an int4 matrix that lie together, and the columns of theirs that do.
TILE, _BLOCK = 16, 8
# Rows of x are filled up to a multiple of this.
_PADDED = 256
_WIDE, _INT8, _INT4 = range(3)


class MatrixFields(ctypes.Structure):
    """`Matrix` of numbers.h. Without `tiles` products go by vectors alone, as they do where the process may not use AMX."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("kind", "rows", "columns", "group")),
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "bias")),
        ("tiles", ctypes.c_long),
        ("bytes", ctypes.c_long),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """What the library is handed, and the tensors it points into."""

    fields: MatrixFields
    tensors: tuple[Tensor, ...]

    @property
    def rows(self) -> int:
        """n, the width of a product."""
        return int(self.fields.rows)


def wide(weight: Float[Tensor, "n k"], bias: Float[Tensor, " n"] | None = None) -> Matrix:
    """A bfloat16 matrix where it lies. It must be contiguous, and the bias, of any matrix, bfloat16."""
    assert weight.dtype == torch.bfloat16 and weight.is_contiguous(), "bfloat16, row behind row"
    return _matrix(_WIDE, len(weight), weight.shape[1], 0, weight, weight[:0], bias)


def int8(codes: Int8[Tensor, "n k"], scales: Float[Tensor, " n"], bias: Float[Tensor, " n"] | None = None) -> Matrix:
    """A byte a weight, with a bfloat16 scale a row; k is a multiple of 16, filled up with zeros."""
    assert codes.shape[1] % 16 == 0 and codes.is_contiguous() and scales.dtype == torch.bfloat16, "padded, row behind row"
    return _matrix(_INT8, len(codes), codes.shape[1], 0, codes, scales, bias)


def int4(
    codes: Int16[Tensor, "tiles blocks 16 2"],
    scales: Float[Tensor, "tiles groups 16 2"],
    rows: int,
    columns: int,
    bias: Float[Tensor, " n"] | None = None,
) -> Matrix:
    """Four bits a weight, as `laid_out` gives them; rows and columns without what fills the last tile and the last group."""
    group = codes.shape[1] * _BLOCK // scales.shape[1]
    assert group % TILE == 0 and _PADDED % group == 0, "groups of 16, 32, 64, 128 or 256"
    return _matrix(_INT4, rows, columns, group, codes, scales, bias)


def _matrix(kind: int, rows: int, columns: int, group: int, weights: Tensor, scales: Tensor, bias: Tensor | None) -> Matrix:
    assert bias is None or bias.dtype == torch.bfloat16, "a bfloat16 bias"
    assert weights.device.type == scales.device.type == "cpu", "on the processor"
    parts = [part for part in (weights, scales, bias) if part is not None]
    pointers = [part.data_ptr() for part in parts] + [None] * (3 - len(parts))
    return Matrix(MatrixFields(kind, rows, columns, group, *pointers, True, kind != _WIDE), tuple(parts))


def laid_out(
    codes: UInt8[Tensor, "n k"], scales: Float[Tensor, "n groups"], zeros: Float[Tensor, "n groups"]
) -> tuple[Int16[Tensor, "tiles blocks 16 2"], Float[Tensor, "tiles groups 16 2"]]:
    """Codes (0 to 15, whole groups of at least 32) and bfloat16 scales and zeros in the order in which a product reads them.

    Sixteen rows lie together: 64 bytes hold eight columns of each, the even ones in the lower half of 32 bits and the odd ones in the
    upper, so that a shift and a lookup give pairs of bfloat16 that one instruction multiplies and adds.
    """
    spare = -len(codes) % TILE
    codes, scales, zeros = (torch.nn.functional.pad(part, (0, 0, 0, spare)) for part in (codes, scales, zeros))
    apart = codes.view(len(codes) // TILE, TILE, -1, 4, 2).to(torch.int32)
    packed = (apart << torch.arange(0, 16, 4, dtype=torch.int32, device="cpu")[:, None]).sum(3, dtype=torch.int32).to(torch.int16)
    both = torch.stack((scales.bfloat16(), zeros.bfloat16()), -1).unflatten(0, (-1, TILE))
    return packed.transpose(1, 2).contiguous(), both.transpose(1, 2).contiguous()


def codes_of(packed: Int16[Tensor, "tiles blocks 16 2"]) -> UInt8[Tensor, "n k"]:
    """The codes again, one a byte, with the rows that fill the last tile."""
    apart = (packed.int()[..., None, :] >> torch.arange(0, 16, 4, dtype=torch.int32, device="cpu")[:, None]) & 15
    return apart.to(torch.uint8).transpose(1, 2).flatten(0, 1).flatten(1)


def product(matrix: Matrix, x: Float[Tensor, "m k"]) -> Float[Tensor, "m n"]:
    """x times the transposed matrix, plus its bias, in float32."""
    functions = library().functions
    assert functions is not None and x.dtype == torch.bfloat16 and x.device.type == "cpu", "the library, and bfloat16 rows"
    rows, out = x.contiguous(), x.new_empty(len(x), matrix.rows, dtype=torch.float32)
    functions.product(ctypes.byref(matrix.fields), rows.data_ptr(), out.data_ptr(), len(rows))
    return out


def written_out(matrix: Matrix) -> Float[Tensor, "n k"]:
    """An int4 matrix, of an even number of columns, as the numbers that it stands for, each rounded to bfloat16 once."""
    functions = library().functions
    assert functions is not None and matrix.fields.kind == _INT4 and matrix.fields.columns % 2 == 0, "the library, and an even int4 matrix"
    out = torch.empty(matrix.rows, matrix.fields.columns, dtype=torch.bfloat16, device="cpu")
    functions.written_out(ctypes.byref(matrix.fields), out.data_ptr())
    return out
