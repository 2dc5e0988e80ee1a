"""The decoder's matrix products, which go another way for a single token than for many."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Linear", "product"]


def product(x: Float[Tensor, "*m k"], weight: Float[Tensor, "n k"], bias: Float[Tensor, " n"] | None = None) -> Float[Tensor, "*m n"]:
    """x times the transposed weight, plus the bias.

    One row in bfloat16 on the processor (a decode step) takes torch's matrix-vector kernel, which streams the weight and sums in float32;
    its matrix product first brings every weight into another layout, which for a single row costs more than the product. So a row alone
    and the same row among others agree to within rounding, not necessarily to the bit.
    """
    if x.numel() != weight.shape[1] or x.dtype != torch.bfloat16 or x.device.type != "cpu" or weight.dtype != x.dtype:
        return F.linear(x, weight, bias)
    row = torch.mv(weight, x.reshape(-1))
    return (row if bias is None else row + bias).view(*x.shape[:-1], -1)


class Linear(nn.Linear):
    """A linear layer that takes `product`."""

    def forward(self, x: Float[Tensor, "*m i"]) -> Float[Tensor, "*m o"]:
        """Width i in, width o out."""
        return product(x, self.weight, self.bias)
