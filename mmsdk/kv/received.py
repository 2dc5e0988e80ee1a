"""How much attention entries of a cache receive from a few queries, beside a fused attention that returns no weights."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kv.types import LayerView

__all__ = ["received", "received_behind"]

# Entries of the weights of a slice of queries that may exist at one time: 8 MiB in float32.
_SLICE = 2**21


def received(query: Float[Tensor, "b h r e"], positions: Int[Tensor, "b r"], view: LayerView, newest: bool = False) -> Float[Tensor, "b t"]:
    """The weight that each entry gets in softmax(q k^T / sqrt(e)), mean over heads and over a row's r queries, in float32.

    `positions` are those of the queries, -1 for padding, which does not count in the mean. A query sees the entries at its own position
    and before, as in `mmsdk.attention.mask`. The cost is r rows of the attention matrix, in slices; nothing of t x t is made. `newest` says
    that the queries are those of the last r columns, so that none sees a column behind its own: of a prompt that is half of the cost.
    """
    b, h, r, _ = query.shape
    t = view.keys.shape[2]
    keys = view.keys.float().transpose(2, 3)
    total = keys.new_zeros(b, t)
    step = max(1, _SLICE // (b * h * t))
    for start in range(0, r, step):
        part, at = query[:, :, start : start + step], positions[:, start : start + step]
        there = t - r + start + part.shape[2] if newest else t
        scores = _scores(part, keys[..., :there])
        seen = (view.positions[:, None, :there] <= at[:, :, None]) & view.valid[:, None, :there] & (at >= 0)[:, :, None]
        alive = seen.any(-1)
        # a query that sees nothing would have a row of NaN: it is shown everything, and does not count
        weights = scores.masked_fill_(~(seen | ~alive[..., None])[:, None], -torch.inf).softmax(dim=-1)
        total[:, :there] += (alive.float().repeat(1, h)[:, None] @ weights.flatten(1, 2))[:, 0]
    return total / (h * (positions >= 0).sum(dim=1, keepdim=True).clamp_min(1))


def received_behind(
    query: Float[Tensor, "b h r e"], view: LayerView, key: Float[Tensor, "b g r e"], bias: Float[Tensor, "#b 1 r u"]
) -> Float[Tensor, "b t"]:
    """The same where the queries, all of which count, stand behind the view with keys of their own, and `bias` says who sees what of both.

    What they give one another is left out. For few queries: the weights of all of them exist at one time.
    """
    keys = torch.cat((view.keys.to(key.dtype), key), dim=2).float().transpose(2, 3)
    weights: Tensor = (_scores(query, keys) + bias.float()).softmax(dim=-1)
    return weights.mean(dim=(1, 2))[:, : view.keys.shape[2]]


def _scores(query: Float[Tensor, "b h r e"], keys: Float[Tensor, "b g e t"]) -> Float[Tensor, "b h r t"]:
    """q k^T / sqrt(e) in float32: the queries that share a key-value head stand below one another, so that keys are not expanded."""
    b, h, r, e = query.shape
    g, t = keys.shape[1], keys.shape[3]
    scores: Tensor = query.float().reshape(b, g, -1, e) * e**-0.5 @ keys
    return scores.view(b, h, r, t)
