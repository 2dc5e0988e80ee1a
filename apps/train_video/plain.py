"""Attention while training on a processor: plain products where few tokens are read, of which torch's fused gradient is twice as slow."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from mmsdk.diffusion.types import Spot

__all__ = ["Plain", "attended"]

_MOST = 1024
"""Tokens that are read, up to which it pays: beyond, all weights at one time are more than caches hold."""


def attended(
    query: Float[Tensor, "b h s d"],
    keys: Float[Tensor, "b h t d"],
    values: Float[Tensor, "b h t d"],
    mask: Bool[Tensor, "#b #h #s t"] | None = None,
) -> Float[Tensor, "b h s d"]:
    """softmax(q k^T / sqrt(d)) v, over what the mask names; in bfloat16 scores are rounded, too."""
    if keys.shape[2] > _MOST:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    scores = (query * query.shape[3] ** -0.5) @ keys.transpose(2, 3)
    shares = (scores if mask is None else scores.masked_fill(~mask, float("-inf"))).softmax(-1)
    out: Tensor = shares.to(values.dtype) @ values
    return out


@dataclass(frozen=True, slots=True)
class Plain:
    """Every token reads every token."""

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b h s d"], values: Float[Tensor, "b h s d"], spot: Spot
    ) -> Float[Tensor, "b h s d"]:
        """See `mmsdk.diffusion.types.Attend`."""
        return attended(query, keys, values)
