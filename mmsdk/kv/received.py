"""How much attention entries of a cache receive from a few queries, beside a fused attention that returns no weights."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kv.types import LayerView

__all__ = ["received"]

# Entries of the weights of a slice of queries that may exist at one time: 8 MiB in float32.
_SLICE = 2**21


def received(query: Float[Tensor, "b h r e"], positions: Int[Tensor, "b r"], view: LayerView) -> Float[Tensor, "b t"]:
    """The weight that each entry gets in softmax(q k^T / sqrt(e)), mean over heads and over a row's r queries, in float32.

    `positions` are those of the queries, -1 for padding, which does not count in the mean. A query sees the entries at its own position
    and before, as in `mmsdk.attention.mask`. The cost is r rows of the attention matrix, in slices; nothing of t x t is made.
    """
    b, h, _, e = query.shape
    g, t = view.keys.shape[1:3]
    keys = view.keys.float().transpose(2, 3)
    total = keys.new_zeros(b, t)
    step = max(1, _SLICE // (b * h * t))
    for part, at in zip(query.split(step, dim=2), positions.split(step, dim=1), strict=True):
        # the queries that share a key-value head stand below one another, so that keys are not expanded
        scores = (part.float().reshape(b, g, -1, e) * e**-0.5 @ keys).view(b, h, -1, t)
        seen = (view.positions[:, None] <= at[:, :, None]) & view.valid[:, None] & (at >= 0)[:, :, None]
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(dim=-1)
        # a query that sees nothing has a row of NaN, and every entry of it is blanked
        total += weights.masked_fill(~seen[:, None], 0).sum(dim=(1, 2))
    return total / (h * (positions >= 0).sum(dim=1, keepdim=True).clamp_min(1))
