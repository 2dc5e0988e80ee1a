"""int8: eight bits a weight, one scale a row.

    weight = scale * code, code -127 to 127

The scale is the greatest magnitude of the row over 127, rounded to bfloat16 before the codes are chosen; rounding is to nearest (common
knowledge, not a paper's). A vocabulary's matrix is stored like this under every scheme: it serves both ends of a tied model at once.

`Int8` is the matrix as numbers, and called it is the reference, in float32. `Int8Linear` takes the same product with a kernel.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from jaxtyping import Int8 as Bytes
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.kernels._triton import launchable
from mmsdk.kernels.cpu.layer import FEW
from mmsdk.kernels.cpu.library import library
from mmsdk.kernels.cpu.matrix import Matrix, int8, product
from mmsdk.quant.launched import product_int8

__all__ = ["Int8", "Int8Embedding", "Int8Linear"]

# The kernel goes 16 columns at a time, and reads x from addresses that are multiples of 32 bytes.
_STEP, _ALIGNED = 16, 32
# From here on it is faster to write the weights out once and multiply as usual: the kernel reads them anew for every four rows. Found on
# a Xeon with AVX-512, on one thread.
_MANY = 48
# And on a GPU, where so many rows read them once.
_LAUNCHED = 65


@dataclass(frozen=True, slots=True)
class Int8:
    """A matrix of signed codes, with the scale of every row."""

    codes: Bytes[Tensor, "n k"]
    scales: Float[Tensor, " n"]

    @classmethod
    def of(cls, weight: Float[Tensor, "n k"]) -> "Int8":
        """Round a wide matrix. A row of zeros has the scale 0."""
        wide = weight.float()
        scales = (wide.abs().amax(1) / 127).bfloat16()
        step = torch.where(scales == 0, 1, scales).float()[:, None]
        return cls((wide / step).round_().clamp_(-127, 127).to(torch.int8), scales)

    @property
    def finite(self) -> bool:
        """Whether it was made from finite numbers."""
        return bool(self.scales.isfinite().all())

    def dequantised(self) -> Float[Tensor, "n k"]:
        """The weights that the codes stand for, in float32."""
        return self.codes.float() * self.scales.float()[:, None]

    def __call__(self, x: Float[Tensor, "*m k"]) -> Float[Tensor, "*m n"]:
        """x times the transposed matrix, the slow way; the kernel is held to this."""
        return F.linear(x.float(), self.dequantised()).to(x.dtype)


class Int8Linear(nn.Module):
    """A linear layer on an `Int8`.

    A few rows (a decode step) go to a kernel that reads a byte a weight and sums in float32: on a processor that of `mmsdk.kernels.cpu`
    where there is one and the rows are very few, else torch's `_weight_int8pack_mm`; where Triton runs those of `mmsdk.quant.launched`. For
    x86 torch has vector code for bfloat16 alone, so that is what all are given, whatever x is. Many rows (a prompt) are multiplied by the
    weights written out in the dtype of x, but in layers that go by `mmsdk.kernels.cpu` as a whole.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, matrix: Int8, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.inputs = matrix.codes.shape[1]
        self.tail = -self.inputs % _STEP
        self.register_buffer("codes", F.pad(matrix.codes, (0, self.tail)), persistent=False)
        # As bits, so that casting the model around it leaves them alone: the kernel wants bfloat16.
        self.register_buffer("scales", matrix.scales.bfloat16().view(torch.int16), persistent=False)
        self.bias = bias

    def forward(self, x: Float[Tensor, "*m i"]) -> Float[Tensor, "*m o"]:
        """x times the transposed matrix, plus the bias, in the dtype of x."""
        flat = x.reshape(-1, self.inputs)
        # The kernels give no gradients.
        few = len(flat) < (_LAUNCHED if launchable(flat) else _MANY) and not (x.requires_grad and torch.is_grad_enabled())
        out = self._streamed(flat) if few else F.linear(flat, self.rows(slice(None), x.dtype))
        out = out.view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias

    def _streamed(self, x: Float[Tensor, "m i"]) -> Float[Tensor, "m o"]:
        rows = F.pad(x.bfloat16(), (0, self.tail)) if self.tail else x.bfloat16().contiguous()
        if launchable(rows):
            return product_int8(rows, self.codes, self.scales.view(torch.bfloat16)[:, None]).to(x.dtype)
        matrix = self._plain() if len(rows) <= FEW else None
        if matrix is not None:
            return product(matrix, rows).to(x.dtype)
        if rows.data_ptr() % _ALIGNED:
            rows = rows.clone()
        return torch._weight_int8pack_mm(rows, self.codes, self.scales.view(torch.bfloat16)).to(x.dtype)

    def native(self) -> Matrix | None:
        """The matrix as the C++ takes it, with its bias; none where it cannot."""
        if self.tail or (self.bias is not None and self.bias.dtype != torch.bfloat16):
            return None
        return self._plain(None if self.bias is None else self.bias.detach())

    def _plain(self, bias: Tensor | None = None) -> Matrix | None:
        return None if library().functions is None else int8(self.codes, self.scales.view(torch.bfloat16), bias)

    def rows(self, which: slice | Int[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
        """Rows of the matrix as numbers, rounded once."""
        scales = self.scales.view(torch.bfloat16)[which].to(dtype)
        return self.codes[which][..., : self.inputs].to(dtype) * scales[..., None]


class Int8Embedding(nn.Module):
    """Looks up the rows of a matrix that also gives the logits: both ends of a tied model stand on the same bytes."""

    like: Tensor

    def __init__(self, table: Int8Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = table
        # Empty; it is cast with the model, and says what dtype the embeddings are to have.
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)

    def forward(self, ids: Int[Tensor, "*n"]) -> Float[Tensor, "*n d"]:
        """Token ids to vectors."""
        return self.table.rows(ids, self.like.dtype)
