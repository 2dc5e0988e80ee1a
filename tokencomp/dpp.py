"""Greedy MAP inference of a determinantal point process: tokens of high quality that are unlike each other.

With the kernel L_ij = q_i cos(i, j) q_j each step takes the token that multiplies the determinant of the chosen ones the most. The gains
are kept up to date with an incremental Cholesky factor (Chen, Zhang and Zhou, "Fast greedy MAP inference for determinantal point
processes to improve recommendation diversity", 2018), so that no more than its rows is needed of L.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.tokencomp.ranking import TIE, first_best
from mmsdk.tokencomp.similarity import cosine_rows

__all__ = ["greedy_dpp"]


def greedy_dpp(z: Float[Tensor, "b n d"], quality: Float[Tensor, "b n"], count: int) -> Int[Tensor, "b m"]:
    """The `count` <= n tokens that greedily maximise the determinant, distinct, in the order in which they were chosen.

    `z` are unit vectors, `quality` is not negative. Once the determinant cannot be kept above zero (the tokens span no more
    dimensions), the earliest tokens fill the rest. Memory is that of the factor, count x n.
    """
    b, n, _ = z.shape
    rows, cosines = torch.arange(b, device=z.device), cosine_rows(z, count)
    # a zero vector has no direction, hence nothing to gain
    gain = quality.square() * z.square().sum(dim=2)
    factor = z.new_zeros(b, count, n)
    chosen = torch.zeros(b, count, dtype=torch.int64, device=z.device)
    for step in range(count):
        pick = first_best(gain)
        chosen[:, step] = pick
        own = gain[rows, pick, None]
        kernel = quality * cosines(pick) * quality[rows, pick, None]
        past = factor[:, :step]
        explained = torch.bmm(past[rows, :, pick][:, None], past)[:, 0]
        # a gain that is zero but for rounding has no direction left to take away
        row = (kernel - explained) * torch.where(own > TIE, own.clamp_min(TIE).rsqrt(), 0.0)
        factor[:, step] = row
        gain = (gain - row.square()).scatter(1, pick[:, None], -torch.inf)
    return chosen
