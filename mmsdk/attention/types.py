"""What an attention is: queries, a view of the cache and a mask to an output."""

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from mmsdk.attention.mask import Mask
from mmsdk.kv.types import View

__all__ = ["Attention"]


@runtime_checkable
class Attention(Protocol):
    """softmax(q k^T / sqrt(d)) v over the entries that the mask lets each query see; the same answer on every device.

    Query heads share key-value heads in order: h / g queries to each. A query that sees nothing gets 0.
    """

    def __call__(self, query: Float[Tensor, "b h s d"], view: View, mask: Mask) -> Float[Tensor, "b h s d"]: ...
