"""int4: four bits a weight, in groups along a row that share a scale and a zero point.

    weight = scale * (code - 8) + zero, code 0 to 15

Groups of 32 with bfloat16 scales and zeros make five bits a weight. GGUF's Q4_0 (zero 0) and Q4_1 (zero = minimum + 8 scale) are this
very form. Wide weights are rounded to nearest between the least and the greatest of their group, as Q4_1 is; the scale and the zero are
rounded to bfloat16 before the codes are chosen, so that the codes make up for it. Round to nearest is common knowledge, not a paper's.

`Int4` is the matrix as numbers, and called it is the reference, in float32. `Int4Linear` takes the same product with torch's own kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float, Int32, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.errors import ModelError

__all__ = ["GROUP", "Int4", "Int4Linear"]

GROUP = 32
_MIDDLE = 8
# Rows of codes that are laid out at a time, and the rows that every known layout treats alike.
_PIECE, _TILE = 1024, 64
# From here on it is faster to write the weights out once and multiply as usual: the kernel reads them anew for every four rows. Found on
# a Xeon with AVX-512, on one thread.
_MANY = 128


@dataclass(frozen=True, slots=True)
class Int4:
    """A matrix [n, columns]: `codes`, one a byte, padded behind to whole groups; k / groups of them share a scale and a zero."""

    codes: UInt8[Tensor, "n k"]
    scales: Float[Tensor, "n groups"]
    zeros: Float[Tensor, "n groups"]
    columns: int

    @classmethod
    def of(cls, weight: Float[Tensor, "n columns"], group: int = GROUP) -> "Int4":
        """Round a wide matrix. Its last group may be short; a group whose weights are all alike has the scale 0."""
        columns = weight.shape[1]
        wide = weight.float()
        # The last weight once more and again does not widen its group.
        wide = torch.cat((wide, wide[:, -1:].expand(-1, -columns % group)), 1).unflatten(1, (-1, group))
        low, high = wide.aminmax(dim=-1)
        scales = ((high - low) / 15).bfloat16()
        zeros = (low + _MIDDLE * scales.float()).bfloat16()
        step = torch.where(scales == 0, 1, scales).float()[..., None]
        codes = ((wide - zeros.float()[..., None]) / step).round_().add_(_MIDDLE).clamp_(0, 15)
        return cls(codes.to(torch.uint8).flatten(1), scales, zeros, columns)

    @classmethod
    def stacked(cls, parts: Sequence["Int4"]) -> "Int4":
        """Matrices of as many columns and as large groups, one below the other."""
        codes, scales, zeros = (torch.cat(tensors) for tensors in zip(*((p.codes, p.scales, p.zeros) for p in parts), strict=True))
        return cls(codes, scales, zeros, parts[0].columns)

    @property
    def finite(self) -> bool:
        """Whether it was made from finite numbers."""
        return bool(self.scales.isfinite().all() and self.zeros.isfinite().all())

    def dequantised(self) -> Float[Tensor, "n columns"]:
        """The weights that the codes stand for, in float32."""
        centred = self.codes.unflatten(1, (self.scales.shape[1], -1)).float() - _MIDDLE
        wide: Tensor = centred * self.scales.float()[..., None] + self.zeros.float()[..., None]
        return wide.flatten(1)[:, : self.columns]

    def __call__(self, x: Float[Tensor, "*m columns"]) -> Float[Tensor, "*m n"]:
        """x times the transposed matrix, the slow way; the kernel is held to this."""
        return F.linear(x.float(), self.dequantised()).to(x.dtype)


class Int4Linear(nn.Module):
    """A linear layer on an `Int4` of groups of 32, 64, 128 or 256, on the processor.

    A few rows (a decode step) go to torch's `_weight_int4pack_mm_for_cpu`, which reads four bits a weight and sums in float32. For x86
    torch has vector code of it for bfloat16 alone, so that is what it is given, whatever x is. Many rows (a prompt) are multiplied by the
    weights written out in the dtype of x.
    The codes lie as the kernel of this processor wants them, which is why they are no part of the state: what is saved is an `Int4`.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, matrix: Int4, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.outputs, self.inputs = len(matrix.codes), matrix.columns
        self.group = matrix.codes.shape[1] // matrix.scales.shape[1]
        self.tail, spare = matrix.codes.shape[1] - matrix.columns, -self.outputs % _TILE
        codes = F.pad(matrix.codes, (0, 0, 0, spare))
        both = torch.stack((matrix.scales.bfloat16().T, matrix.zeros.bfloat16().T), -1)
        self.register_buffer("codes", torch.cat([_laid_out(piece.int()) for piece in codes.split(_PIECE)]), persistent=False)
        # As bits, so that casting the model around it leaves them alone: the kernel wants bfloat16.
        self.register_buffer("scales", F.pad(both, (0, 0, 0, spare)).contiguous().view(torch.int16), persistent=False)
        self.bias = bias

    def forward(self, x: Float[Tensor, "*m i"]) -> Float[Tensor, "*m o"]:
        """x times the transposed matrix, plus the bias, in the dtype of x."""
        flat = x.reshape(-1, self.inputs)
        out = self._streamed(flat) if len(flat) < _MANY else flat @ self.written_out(x.dtype)
        out = (out if out.shape[1] == self.outputs else out[:, : self.outputs]).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias

    def _streamed(self, x: Float[Tensor, "m i"]) -> Float[Tensor, "m r"]:
        rows = F.pad(x.bfloat16(), (0, self.tail)) if self.tail else x.bfloat16().contiguous()
        out = torch._weight_int4pack_mm_for_cpu(rows, self.codes, self.group, self.scales.view(torch.bfloat16))
        return out if x.dtype == torch.bfloat16 else out.to(x.dtype)

    def written_out(self, dtype: torch.dtype) -> Float[Tensor, "i r"]:
        """The transposed matrix as numbers, with some rows more of the untransposed one."""
        rows, groups = len(self.codes), self.scales.shape[0]
        tile, neighbours = _layout()
        codes = _read_back(self.codes, tile, neighbours).unflatten(1, (groups, -1))
        scales, zeros = self.scales.view(torch.bfloat16).to(dtype).view(groups, 1, rows // tile, tile, 2).permute(4, 2, 0, 1, 3)
        out = torch.empty(groups, self.group, rows // tile, tile, dtype=dtype)
        # Written where it belongs, a tile's width at a time, and rounded once: what a bfloat16 model has after loading.
        torch.addcmul(zeros, codes.to(dtype) - _MIDDLE, scales, out=out.permute(2, 0, 1, 3))
        return out.view(-1, rows)[: self.inputs]


def _laid_out(codes: Int32[Tensor, "r k"]) -> UInt8[Tensor, "r half"]:
    """Codes as the kernel wants them, two a byte; whole tiles of rows do not depend on one another."""
    return torch._convert_weight_to_int4pack_for_cpu(codes, 1)


def _read_back(packed: UInt8[Tensor, "r half"], tile: int, neighbours: bool) -> UInt8[Tensor, "tiles k tile"]:
    """The codes of each tile of rows, column by column. A byte holds two rows: next to each other, or half a tile apart."""
    columns = packed.view(len(packed) // tile, -1, tile // 2)
    halves = columns & 15, columns >> 4
    return torch.stack(halves, -1).flatten(-2) if neighbours else torch.cat(halves, -1)


@cache
def _layout() -> tuple[int, bool]:
    """How this processor's kernel wants codes, found by giving it some: rows a tile, and whether a byte holds neighbours.

    The layout follows the vector instructions that torch uses here. Raises ModelError where it is none of those known.
    """
    codes = torch.randint(0, 16, (_TILE, GROUP), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    packed = _laid_out(codes)
    for tile, neighbours in ((64, False), (32, False), (64, True), (32, True), (16, True)):
        if torch.equal(_read_back(packed, tile, neighbours).transpose(1, 2).flatten(0, 1).int(), codes):
            return tile, neighbours
    raise ModelError(f"torch {torch.__version__} lays int4 weights out in a way that is not known here; use quantize='int8'")
