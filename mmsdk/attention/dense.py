"""Every query over every entry that it may see, wherever it lies."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mmsdk.attention.mask import Bias, Causal, Everything, Mask, side_by_side
from mmsdk.attention.paged import over_pages, readable
from mmsdk.attention.tiled import band_of, over_band
from mmsdk.kernels.cpu import prompt
from mmsdk.kv.types import LayerView, PagedView, View

__all__ = ["Dense"]

# Measured on one AMX core, 9 heads of 64 over 3: with gradients in bfloat16, plain products take 1.6 ms at 64 tokens and 39 ms at 300,
# the fused kernel 6.6 and 84; at 1,000 tokens it is 212 to 110. Without gradients, or in float32, the fused kernel is never behind.
_SHORT = 512


@dataclass(frozen=True, slots=True)
class Dense:
    """torch's fused attention, or tiles: in C++ (`mmsdk.kernels.cpu.prompt`) for several queries in bfloat16 where there is its library, in
    Triton (`mmsdk.attention.tiled`) for several queries where it runs, and where some of what stands before them is hidden.

    Plain matrix products where those are faster: gradients, CPU, a half-size dtype, at most 512 entries.

    Keys and values are never expanded to the query heads. Of pages, a single new token a row reads each where it lies; several new ones
    are worth laying the row's tokens side by side first (`mmsdk.attention.paged`).
    """

    def __call__(self, query: Float[Tensor, "b h s d"], view: View, mask: Mask) -> Float[Tensor, "b h s d"]:
        """See `mmsdk.attention.types.Attention`. The mask must be of this view, as `Masks.of` gives it."""
        if isinstance(view, PagedView):
            if query.shape[2] == 1 and isinstance(mask, Everything) and readable(query, view):
                return over_pages(query, view)
            return self(query, *side_by_side(view, mask, query.dtype))
        for band in band_of(query, view, mask):
            return over_band(query, view, band)
        bias = mask.bias if isinstance(mask, Bias) else None
        if prompt.attends(query, view.keys, view.values) and (bias is None or (bias.dtype == query.dtype and bias.stride(3) == 1)):
            behind = 0 if isinstance(mask, Causal) else view.keys.shape[2]
            out = prompt.attend(query, view.keys, view.values, behind, () if bias is None else (bias,))
        elif _plain(query, view) and not isinstance(mask, Causal):
            out = _products(query, view, bias)
        else:
            out = _fused(query, view, bias, isinstance(mask, Causal))
        return out.masked_fill(~mask.alive, 0) if isinstance(mask, Bias) else out


def _plain(query: Tensor, view: LayerView) -> bool:
    return query.requires_grad and query.device.type == "cpu" and query.dtype != torch.float32 and view.keys.shape[2] <= _SHORT


def _fused(query: Float[Tensor, "b h s d"], view: LayerView, bias: Float[Tensor, "#b 1 s t"] | None, causal: bool) -> Tensor:
    grouped = query.shape[1] != view.keys.shape[1]
    if not grouped or query.shape[2] > 1:
        return F.scaled_dot_product_attention(query, view.keys, view.values, bias, is_causal=causal, enable_gqa=grouped)
    # One new token sees all that the mask lets it, whichever head asks: heads that share keys go below one another, as its rows, since
    # for heads beside one another torch lays the keys out anew.
    rows = query.unflatten(1, (view.keys.shape[1], -1)).squeeze(3)
    return F.scaled_dot_product_attention(rows, view.keys, view.values, bias).reshape(query.shape)


def _products(query: Float[Tensor, "b h s d"], view: LayerView, bias: Float[Tensor, "#b 1 s t"] | None) -> Float[Tensor, "b h s d"]:
    """The same in two batched products: the queries that share a key-value head stand below one another as its rows."""
    b, h, s, d = query.shape
    g, t = view.keys.shape[1:3]
    scores = torch.bmm(query.reshape(b * g, h // g * s, d) * d**-0.5, view.keys.reshape(b * g, t, d).transpose(1, 2))
    wide = scores.view(b, h, s, t).float()
    shares = (wide if bias is None else wide + bias).softmax(-1).to(query.dtype)
    return torch.bmm(shares.view(b * g, h // g * s, t), view.values.reshape(b * g, t, d)).view(b, h, s, d)
