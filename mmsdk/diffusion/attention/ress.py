"""ReSS: keep the blocks without which the residual stream would drift the most, not those with the most attention.

Source: Residual-restoring sparse attention for 3-D vision transformers, arXiv 2609.35593. Published, with P the attention between block
means, V_j the mean value of key block j, v_i = sum_j P_ij V_j the dense pooled output of row i, W_O the output projection of the head:

    score_ij = P_ij |W_O (v_i - V_j)| / max(1 - P_ij, 1e-4),        the drift of row i's output when block j alone is dropped
    J_i = g^T G g / K^2,   G = W_O^T W_O,   g = sum_dropped P_ij (V_j - v_i),   K = 1 - sum_dropped P_ij,   the same of a whole drop set

Norms are taken in Gram form, so that nothing as wide as the residual stream is made. The c blocks with the best scores are kept; in rounds
r = 0 to 4 as many blocks as m = rho 2^-(r+1) c, rho = 1/2, are swapped, the budget kept, and the set with the smallest J seen is what is
kept. Reconstruction: in a round the dropped blocks whose return alone lowers J the most come back, and the kept ones whose drop alone
raises it the least go; at least one of each.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mmsdk.diffusion.attention.blocks import kept_most
from mmsdk.kernels.ops.restore import LEAST, distances, set_drift
from mmsdk.kernels.ops.restore import restore as mended

__all__ = ["drop_scores", "gram", "restore", "set_drift"]


def gram(projection: Float[Tensor, "h e d"]) -> Float[Tensor, "h d d"]:
    """W_O^T W_O of every head, float32."""
    wide = projection.float()
    return wide.transpose(1, 2) @ wide


def drop_scores(
    shares: Float[Tensor, "b h rows columns"], values: Float[Tensor, "b h columns d"], metric: Float[Tensor, "h d d"]
) -> Float[Tensor, "b h rows columns"]:
    """How far row i's output moves in the residual stream when key block j alone is dropped. `shares` are P, `values` V, `metric` G."""
    return shares * distances(shares @ values, values, metric).sqrt() / (1 - shares).clamp_min(LEAST)


def restore(
    scores: Float[Tensor, "b h rows columns"],
    shares: Float[Tensor, "b h rows columns"],
    values: Float[Tensor, "b h columns d"],
    metric: Float[Tensor, "h d d"],
    count: int,
    always: Bool[Tensor, " columns"],
    rounds: int = 5,
    rho: float = 0.5,
) -> Bool[Tensor, "b h rows columns"]:
    """The `count` blocks of each row that are kept, those that are `always` kept among them, after `rounds` of swaps."""
    kept = kept_most(scores.masked_fill(always, torch.inf), count)
    return mended(kept, shares, values, metric, always, count, rounds, rho)
