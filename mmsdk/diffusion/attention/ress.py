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

__all__ = ["drop_scores", "gram", "restore", "set_drift"]

_LEAST = 1e-4


def gram(projection: Float[Tensor, "h e d"]) -> Float[Tensor, "h d d"]:
    """W_O^T W_O of every head, float32."""
    wide = projection.float()
    return wide.transpose(1, 2) @ wide


def drop_scores(
    shares: Float[Tensor, "b h rows columns"], values: Float[Tensor, "b h columns d"], metric: Float[Tensor, "h d d"]
) -> Float[Tensor, "b h rows columns"]:
    """How far row i's output moves in the residual stream when key block j alone is dropped. `shares` are P, `values` V, `metric` G."""
    return shares * _distances(shares @ values, values, metric).sqrt() / (1 - shares).clamp_min(_LEAST)


def set_drift(
    kept: Bool[Tensor, "b h rows columns"],
    shares: Float[Tensor, "b h rows columns"],
    values: Float[Tensor, "b h columns d"],
    metric: Float[Tensor, "h d d"],
) -> Float[Tensor, "b h rows"]:
    """J: the squared drift of each row's output when all that is not kept is dropped."""
    lost, left = _lost(kept, shares, values)
    return torch.einsum("bhrd,hde,bhre->bhr", lost, metric, lost) / left.square()


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
    best, least = kept, set_drift(kept, shares, values, metric)
    free = min(count, shares.shape[3]) - int(always.sum())
    for turn in range(rounds):
        moves = min(max(int(rho * 2.0 ** -(turn + 1) * count), 1), free, shares.shape[3] - count)
        if moves <= 0:
            break
        kept = _swapped(kept, shares, values, metric, moves, always)
        drift = set_drift(kept, shares, values, metric)
        better = drift < least
        best, least = torch.where(better[..., None], kept, best), torch.where(better, drift, least)
    return best


def _swapped(kept: Tensor, shares: Tensor, values: Tensor, metric: Tensor, moves: int, always: Tensor) -> Tensor:
    """The kept blocks after `moves` came back and as many went, by what each alone would do to J."""
    lost, left = _lost(kept, shares, values)
    dense = shares @ values
    pushed = torch.einsum("bhrd,hde->bhre", lost, metric)
    # of a = P_ij (V_j - v_i): g^T G a and a^T G a
    along = shares * (pushed @ values.transpose(2, 3) - (pushed * dense).sum(-1, keepdim=True))
    own = shares.square() * _distances(dense, values, metric)
    now = (pushed * lost).sum(-1, keepdim=True)
    back = (now - 2 * along + own) / (left[..., None] + shares).square()
    gone = (now + 2 * along + own) / (left[..., None] - shares).clamp_min(_LEAST).square()
    returning = kept_most(-back.masked_fill(kept, torch.inf), moves)
    leaving = kept_most(-gone.masked_fill(~kept | always, torch.inf), moves)
    return (kept | returning) & ~leaving


def _lost(kept: Tensor, shares: Tensor, values: Tensor) -> tuple[Float[Tensor, "b h rows d"], Float[Tensor, "b h rows"]]:
    """g and K of a drop set."""
    dropped = shares.masked_fill(kept, 0)
    weight = dropped.sum(-1)
    return dropped @ values - weight[..., None] * (shares @ values), (1 - weight).clamp_min(_LEAST)


def _distances(
    rows: Float[Tensor, "b h rows d"], columns: Float[Tensor, "b h columns d"], metric: Float[Tensor, "h d d"]
) -> Float[Tensor, "b h rows columns"]:
    """|W_O (row - column)|^2 of all pairs, expanded."""
    pushed = rows @ metric
    squares = (pushed * rows).sum(-1)[..., None] + ((columns @ metric) * columns).sum(-1)[:, :, None]
    return (squares - 2 * pushed @ columns.transpose(2, 3)).clamp_min(0)
