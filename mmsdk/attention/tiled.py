"""Several new tokens of each row over all that it may see, by a Triton kernel that is told of a band in the place of a mask.

Rows of a batch, padded in front, are sequences to `mmsdk.kernels.ops.flash_prefill`, read where they lie. It skips what a window or the
future hides, and neither scores nor a mask of pairs are written to memory: the bias that torch's attention reads, for every pair, seen or
not, is made only where somebody asks for it (`mmsdk.attention.mask.Bias`).

The choice is made by `band_of` and nowhere else: for bands that kernels take (`mmsdk.attention.launch`). Rows that
are whole and causal need no bias, and go to torch's own kernel, as do one new token a row, whose bias is a row, and heads wider than 256.
No GPU has run this yet, so that none of it rests on a measurement.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.attention.launch import launches
from mmsdk.attention.mask import Band, Bias, Mask
from mmsdk.kernels.ops.flash_prefill import flash_prefill
from mmsdk.kv.types import LayerView

__all__ = ["band_of", "over_band"]


def band_of(query: Float[Tensor, "b h s d"], view: LayerView, mask: Mask) -> tuple[Band, ...]:
    """The band to be told of, if the kernel takes these tensors."""
    taken = isinstance(mask, Bias) and min(view.values.shape) > 0 and launches(query, view.keys, view.values)
    return mask.band if isinstance(mask, Bias) and taken else ()


def over_band(query: Float[Tensor, "b h s d"], view: LayerView, band: Band) -> Float[Tensor, "b h s e"]:
    """softmax(q k^T / sqrt(d)) v over what each query sees; a query that sees nothing, as padding does, gives 0."""
    b, h, s, d = query.shape
    t, device = view.keys.shape[2], query.device
    (keys, step), (values, other) = (_in_line(x) for x in (view.keys, view.values))
    if step != other:
        (keys, step), (values, _) = (_in_line(x.contiguous()) for x in (view.keys, view.values))
    row = torch.arange(b + 1, device=device)
    padding = band.padding.to(device)
    rows = query.transpose(1, 2).reshape(b * s, h, d)
    sequences = row * s, row[:-1] * step + padding, s
    out, _ = flash_prefill(rows, keys, values, *sequences, d**-0.5, window=band.window, key_counts=t - padding)
    return out.view(b, s, h, -1).transpose(1, 2)


def _in_line(x: Float[Tensor, "b g t d"]) -> tuple[Float[Tensor, "n g d"], int]:
    """The tokens of all rows as one line, and how many places there are from a row to the next: a view, if memory allows it."""
    b, g, t, d = x.shape
    if x.stride(3) != 1 or x.stride(2) < 1 or (b > 1 and x.stride(0) % x.stride(2)):
        return x.transpose(1, 2).reshape(b * t, g, d), t
    step = x.stride(0) // x.stride(2) if b > 1 else t
    # between the rows lie other heads' tokens, or spare ones, that no sequence reaches
    return x.as_strided(((b - 1) * step + t, g, d), (x.stride(2), x.stride(1), 1)), step
