"""How much attention entries of a cache receive from a few queries, beside a fused attention that returns no weights."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kv.types import LayerView

__all__ = ["received"]

# Entries of the weights of a slice of queries that may exist at one time: 8 MiB in float32.
_SLICE = 2**21


def received(query: Float[Tensor, "b h r e"], positions: Int[Tensor, "b r"], view: LayerView, newest: bool = False) -> Float[Tensor, "b t"]:
    """The weight that each entry gets in softmax(q k^T / sqrt(e)), mean over heads and over a row's r queries, in float32.

    `positions` are those of the queries, -1 for padding, which does not count in the mean. A query sees the entries at its own position
    and before, as in `mmsdk.attention.mask`. The cost is r rows of the attention matrix, in slices; nothing of t x t is made. `newest` says
    that the queries are those of the last r columns, so that none sees a column behind its own: of a prompt that is half of the cost.
    """
    b, h, r, e = query.shape
    g, t = view.keys.shape[1:3]
    keys = view.keys.float().transpose(2, 3)
    total = keys.new_zeros(b, t)
    step = max(1, _SLICE // (b * h * t))
    for start in range(0, r, step):
        part, at = query[:, :, start : start + step], positions[:, start : start + step]
        there = t - r + start + part.shape[2] if newest else t
        # the queries that share a key-value head stand below one another, so that keys are not expanded
        scores = (part.float().reshape(b, g, -1, e) * e**-0.5 @ keys[..., :there]).view(b, h, -1, there)
        seen = (view.positions[:, None, :there] <= at[:, :, None]) & view.valid[:, None, :there] & (at >= 0)[:, :, None]
        alive = seen.any(-1)
        # a query that sees nothing would have a row of NaN: it is shown everything, and does not count
        weights = scores.masked_fill_(~(seen | ~alive[..., None])[:, None], -torch.inf).softmax(dim=-1)
        total[:, :there] += (alive.float().repeat(1, h)[:, None] @ weights.flatten(1, 2))[:, 0]
    return total / (h * (positions >= 0).sum(dim=1, keepdim=True).clamp_min(1))
