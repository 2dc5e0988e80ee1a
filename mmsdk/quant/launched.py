"""Products with matrices in fewer bits by Triton's kernels: a row as a vector, several by tiles that read each code once."""

from jaxtyping import Float, Int8, UInt8
from torch import Tensor

from mmsdk.kernels.ops.gemv import gemv_int4, gemv_int8
from mmsdk.kernels.ops.small_gemm import small_gemm_int4, small_gemm_int8

__all__ = ["product_int4", "product_int8"]


def product_int8(x: Float[Tensor, "m k"], codes: Int8[Tensor, "n k"], scales: Float[Tensor, "n groups"]) -> Float[Tensor, "m n"]:
    """x times the transposed int8 matrix."""
    return gemv_int8(x, codes, scales) if len(x) == 1 else small_gemm_int8(x, codes, scales)


def product_int4(
    x: Float[Tensor, "m k"], packed: UInt8[Tensor, "n half"], scales: Float[Tensor, "n groups"], offsets: Float[Tensor, "n groups"]
) -> Float[Tensor, "m n"]:
    """x times the transposed int4 matrix."""
    return gemv_int4(x, packed, scales, offsets) if len(x) == 1 else small_gemm_int4(x, packed, scales, offsets)
