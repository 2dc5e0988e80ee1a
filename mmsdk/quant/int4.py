"""int4: four bits a weight, in groups along a row that share a scale and a zero point.

    weight = scale * (code - 8) + zero, code 0 to 15

Groups of 32 with bfloat16 scales and zeros make five bits a weight. GGUF's Q4_0 (zero 0) and Q4_1 (zero = minimum + 8 scale) are this
very form. Wide weights are rounded to nearest between the least and the greatest of their group, as Q4_1 is; the scale and the zero are
rounded to bfloat16 before the codes are chosen, so that the codes make up for it. Round to nearest is common knowledge, not a paper's.

`Int4` is the matrix as numbers, and called it is the reference, in float32. `Int4Linear` takes the same product with a kernel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.kernels.cpu.library import library
from mmsdk.kernels.cpu.matrix import Matrix
from mmsdk.quant.int4_layout import LaunchedLayout, NativeLayout, TorchLayout

__all__ = ["GROUP", "Int4", "Int4Linear"]

GROUP = 32
_MIDDLE = 8


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
    """A linear layer on an `Int4` of groups of 32, 64, 128 or 256.

    A few rows (a decode step) go to a kernel that reads four bits a weight and sums in float32. It takes bfloat16, so that is what it is
    given, whatever x is. Many rows (a prompt) are multiplied by the weights written out in the dtype of x,
    but in layers that go by `mmsdk.kernels.cpu` as a whole.
    The codes lie as the kernel wants them, which is why they are no part of the state: what is saved is an `Int4`.
    """

    def __init__(self, matrix: Int4, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.outputs, self.inputs = len(matrix.codes), matrix.columns
        here = library().functions is not None and self.inputs % 2 == 0
        self.layout: NativeLayout | TorchLayout | LaunchedLayout = (NativeLayout if here else TorchLayout)(
            matrix.codes, matrix.scales, matrix.zeros, matrix.columns
        )
        self.bias = bias

    def forward(self, x: Float[Tensor, "*m i"]) -> Float[Tensor, "*m o"]:
        """x times the transposed matrix, plus the bias, in the dtype of x."""
        flat = x.reshape(-1, self.inputs)
        # The kernels give no gradients.
        few = len(flat) < self.layout.few and not (x.requires_grad and torch.is_grad_enabled())
        out = self.layout.product(flat.bfloat16()).to(x.dtype) if few else F.linear(flat, self.layout.written_out(x.dtype))
        out = out.reshape(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Int4Linear":
        """Codes that move to a GPU lie there as its kernel wants them."""
        if fn(torch.empty(0)).is_cuda and not isinstance(self.layout, LaunchedLayout):
            self.layout = LaunchedLayout(*self.layout.given())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's own
        return self

    def native(self) -> Matrix | None:
        """The matrix as the C++ takes it, with its bias; none where it lies otherwise."""
        if not isinstance(self.layout, NativeLayout) or (self.bias is not None and self.bias.dtype != torch.bfloat16):
            return None
        return self.layout.matrix(None if self.bias is None else self.bias.detach())
