"""The decoder's matrix products, which go another way for a single token than for many."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.kernels.cpu import matrix
from mmsdk.kernels.cpu.layer import FEW
from mmsdk.kernels.cpu.library import library

__all__ = ["Linear", "product", "scores"]

# Up to here the weight is the larger operand by far. Measured with AMX: 64 rows take 0.22 ms so and 0.37 otherwise, of 3,072 outputs.
_SMALL = 64


def product(x: Float[Tensor, "*m k"], weight: Float[Tensor, "n k"], bias: Float[Tensor, " n"] | None = None) -> Float[Tensor, "*m n"]:
    """x times the transposed weight, plus the bias.

    A few rows in bfloat16 on the processor (a decode step) leave the weight where it lies and read it once: torch's product would bring
    every weight into another layout first, which costs more than the product. Up to sixteen go to the C++ of `mmsdk.kernels.cpu`, where
    there is one; else one row is a matrix-vector product, and several are the small operand of the transposed one, whose result is
    transposed back as a view. All sum in float32, so that a row alone and the same row among others agree to within rounding, not
    necessarily to the bit.
    """
    if x.numel() > _SMALL * weight.shape[1] or x.dtype != torch.bfloat16 or x.device.type != "cpu" or weight.dtype != x.dtype:
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, weight.shape[1])
    if _native(rows, weight):
        found = matrix.product(matrix.wide(weight.detach()), rows).to(x.dtype)
    else:
        found = torch.mv(weight, rows[0])[None] if len(rows) == 1 else F.linear(weight, rows).T
    return (found if bias is None else found + bias).view(*x.shape[:-1], -1)


def scores(x: Float[Tensor, "*m k"], weight: Float[Tensor, "n k"]) -> Float[Tensor, "*m n"]:
    """The same in float32, to which sums are not rounded first where C++ takes the rows."""
    rows = x.reshape(-1, weight.shape[1])
    if weight.dtype == x.dtype == torch.bfloat16 and x.device.type == "cpu" and _native(rows, weight):
        return matrix.product(matrix.wide(weight.detach()), rows).view(*x.shape[:-1], -1)
    return product(x, weight).float()


def _native(rows: Float[Tensor, "m k"], weight: Float[Tensor, "n k"]) -> bool:
    """Whether C++ is for so many bfloat16 rows on the processor."""
    return len(rows) <= FEW and not torch.is_grad_enabled() and weight.is_contiguous() and library().functions is not None


class Linear(nn.Linear):
    """A linear layer that takes `product`."""

    def forward(self, x: Float[Tensor, "*m i"]) -> Float[Tensor, "*m o"]:
        """Width i in, width o out."""
        return product(x, self.weight, self.bias)
