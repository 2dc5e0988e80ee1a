"""How the codes of an int4 matrix lie in memory, which is as the kernel that multiplies by them wants it.

`NativeLayout` is read by the C++ of `mmsdk.kernels.cpu`, where this machine has it; `TorchLayout` by torch's own kernel, on every other
processor; `LaunchedLayout` by Triton's kernels, on a GPU.
Scales and zeros are kept as bits, so that casting the model around them leaves them alone: the kernels want bfloat16.
"""

from functools import cache
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int32, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.errors import ModelError
from mmsdk.kernels.cpu import matrix as native
from mmsdk.kernels.weights import pack, unpack
from mmsdk.quant.launched import product_int4

__all__ = ["LaunchedLayout", "Layout", "NativeLayout", "TorchLayout"]

_MIDDLE = 8
# Rows of codes that are laid out at a time, and the rows that every known layout of torch's treats alike.
_PIECE, _TILE = 1024, 64


@runtime_checkable
class Layout(Protocol):
    """Codes [n, k], whole groups, with a scale and a zero a group."""

    @property
    def few(self) -> int:
        """Below so many rows of x a product of the codes is faster than one of the weights written out first."""
        ...

    def product(self, x: Float[Tensor, "m i"]) -> Float[Tensor, "m n"]:
        """x, in bfloat16, times the transposed matrix; summed in float32."""
        ...

    def written_out(self, dtype: torch.dtype) -> Float[Tensor, "n i"]:
        """The matrix as numbers, each rounded once."""
        ...

    def given(self) -> tuple[UInt8[Tensor, "n k"], Float[Tensor, "n g"], Float[Tensor, "n g"], int]:
        """Codes, scales and zeros as they were given, and how many columns of the codes count."""
        ...


class NativeLayout(nn.Module):
    """Sixteen rows together, eight columns of each side by side (`mmsdk.kernels.cpu.matrix.laid_out`)."""

    codes: Tensor
    scales: Tensor

    def __init__(self, codes: UInt8[Tensor, "n k"], scales: Float[Tensor, "n g"], zeros: Float[Tensor, "n g"], columns: int) -> None:
        super().__init__()
        self.rows, self.columns = len(codes), columns
        # A piece at a time: while they are laid out, codes take eight times their memory.
        pieces = [native.laid_out(*piece) for piece in zip(*(part.split(_PIECE) for part in (codes, scales, zeros)), strict=True)]
        self.register_buffer("codes", torch.cat([piece for piece, _ in pieces]), persistent=False)
        self.register_buffer("scales", torch.cat([piece for _, piece in pieces]).view(torch.int16), persistent=False)

    @property
    def few(self) -> int:
        """See `Layout`. Up to sixteen rows cost what one does, where there is AMX, and less than so many products elsewhere."""
        return 17

    def matrix(self, bias: Tensor | None = None) -> native.Matrix:
        """What the C++ takes."""
        return native.int4(self.codes, self.scales.view(torch.bfloat16), self.rows, self.columns, bias)

    def product(self, x: Float[Tensor, "m i"]) -> Float[Tensor, "m n"]:
        """See `Layout`."""
        return native.product(self.matrix(), x)

    def written_out(self, dtype: torch.dtype) -> Float[Tensor, "n i"]:
        """See `Layout`."""
        if dtype == torch.bfloat16:
            return native.written_out(self.matrix())
        codes, scales, zeros, _ = self.given()
        apart = codes.unflatten(1, (scales.shape[1], -1)).to(dtype) - _MIDDLE
        return torch.addcmul(zeros.to(dtype)[..., None], apart, scales.to(dtype)[..., None]).flatten(1)[:, : self.columns]

    def given(self) -> tuple[UInt8[Tensor, "n k"], Float[Tensor, "n g"], Float[Tensor, "n g"], int]:
        """See `Layout`."""
        scales, zeros = (part.transpose(1, 2).flatten(0, 1)[: self.rows] for part in self.scales.view(torch.bfloat16).unbind(-1))
        return native.codes_of(self.codes)[: self.rows], scales, zeros, self.columns


class TorchLayout(nn.Module):
    """For torch's `_weight_int4pack_mm_for_cpu`, which reads four bits a weight; for x86 it has vector code for bfloat16 alone."""

    codes: Tensor
    scales: Tensor

    def __init__(self, codes: UInt8[Tensor, "n k"], scales: Float[Tensor, "n g"], zeros: Float[Tensor, "n g"], columns: int) -> None:
        super().__init__()
        self.rows, self.columns, self.group = len(codes), columns, codes.shape[1] // scales.shape[1]
        self.tail, spare = codes.shape[1] - columns, -len(codes) % _TILE
        both = torch.stack((scales.bfloat16().T, zeros.bfloat16().T), -1)
        filled = F.pad(codes, (0, 0, 0, spare))
        self.register_buffer("codes", torch.cat([_laid_out(piece.int()) for piece in filled.split(_PIECE)]), persistent=False)
        self.register_buffer("scales", F.pad(both, (0, 0, 0, spare)).contiguous().view(torch.int16), persistent=False)

    @property
    def few(self) -> int:
        """See `Layout`. The kernel reads the codes anew for every four rows. Found on a Xeon with AVX-512, on one thread."""
        return 128

    def product(self, x: Float[Tensor, "m i"]) -> Float[Tensor, "m n"]:
        """See `Layout`."""
        rows = F.pad(x, (0, self.tail)) if self.tail else x.contiguous()
        out: Tensor = torch._weight_int4pack_mm_for_cpu(rows, self.codes, self.group, self.scales.view(torch.bfloat16))
        return out[:, : self.rows]

    def written_out(self, dtype: torch.dtype) -> Float[Tensor, "n i"]:
        """See `Layout`."""
        rows, groups = len(self.codes), self.scales.shape[0]
        tile, neighbours = _layout()
        codes = _read_back(self.codes, tile, neighbours).unflatten(1, (groups, -1))
        scales, zeros = self.scales.view(torch.bfloat16).to(dtype).view(groups, 1, rows // tile, tile, 2).permute(4, 2, 0, 1, 3)
        out = torch.empty(groups, self.group, rows // tile, tile, dtype=dtype)
        # Written where it belongs, a tile's width at a time, and rounded once: what a bfloat16 model has after loading.
        torch.addcmul(zeros, codes.to(dtype) - _MIDDLE, scales, out=out.permute(2, 0, 1, 3))
        return out.view(-1, rows)[: self.columns, : self.rows].T

    def given(self) -> tuple[UInt8[Tensor, "n k"], Float[Tensor, "n g"], Float[Tensor, "n g"], int]:
        """See `Layout`."""
        codes = _read_back(self.codes, *_layout()).transpose(1, 2).flatten(0, 1)[: self.rows]
        scales, zeros = (part.T[: self.rows] for part in self.scales.view(torch.bfloat16).unbind(-1))
        return codes, scales, zeros, self.columns


class LaunchedLayout(nn.Module):
    """Two neighbours of a row to a byte, and what is added to a code times its scale, for `mmsdk.kernels.ops.small_gemm`."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def __init__(self, codes: UInt8[Tensor, "n k"], scales: Float[Tensor, "n g"], zeros: Float[Tensor, "n g"], columns: int) -> None:
        super().__init__()
        self.rows, self.columns, self.tail = len(codes), columns, codes.shape[1] - columns
        self.register_buffer("codes", pack(codes).contiguous(), persistent=False)
        # with a code of 0; the difference of two bfloat16 is no bfloat16
        least = zeros.float() - _MIDDLE * scales.float()
        self.register_buffer("scales", scales.bfloat16().contiguous().view(torch.int16), persistent=False)
        self.register_buffer("zeros", least.contiguous().view(torch.int32), persistent=False)

    @property
    def few(self) -> int:
        """See `Layout`. So many rows read the codes once."""
        return 65

    def product(self, x: Float[Tensor, "m i"]) -> Float[Tensor, "m n"]:
        """See `Layout`."""
        rows = F.pad(x, (0, self.tail)) if self.tail else x
        return product_int4(rows, self.codes, self.scales.view(torch.bfloat16), self.zeros.view(torch.float32))

    def written_out(self, dtype: torch.dtype) -> Float[Tensor, "n i"]:
        """See `Layout`."""
        least, scales = self.zeros.view(torch.float32), self.scales.view(torch.bfloat16).float()
        codes = unpack(self.codes).unflatten(1, (scales.shape[1], -1)).float()
        return torch.addcmul(least[..., None], codes, scales[..., None]).flatten(1)[:, : self.columns].to(dtype)

    def given(self) -> tuple[UInt8[Tensor, "n k"], Float[Tensor, "n g"], Float[Tensor, "n g"], int]:
        """See `Layout`."""
        scales = self.scales.view(torch.bfloat16)
        return unpack(self.codes), scales, (self.zeros.view(torch.float32) + _MIDDLE * scales.float()).bfloat16(), self.columns


def _laid_out(codes: Int32[Tensor, "r k"]) -> UInt8[Tensor, "r half"]:
    """Codes as torch's kernel wants them, two a byte; whole tiles of rows do not depend on one another."""
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
    codes = torch.randint(0, 16, (_TILE, 32), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    packed = _laid_out(codes)
    for tile, neighbours in ((64, False), (32, False), (64, True), (32, True), (16, True)):
        if torch.equal(_read_back(packed, tile, neighbours).transpose(1, 2).flatten(0, 1).int(), codes):
            return tile, neighbours
    raise ModelError(f"torch {torch.__version__} lays int4 weights out in a way that is not known here; use quantize='int8'")
