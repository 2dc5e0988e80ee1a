"""Farthest-point seeding: tokens that are as unlike each other as can be, chosen one after the other.

Each choice depends on all before it, so the loop runs over the tokens to choose; a step takes the cosines of all tokens to the newest
one, for the whole batch at once, and nothing is read back from the device.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.tokencomp.ranking import first_best
from mmsdk.tokencomp.similarity import cosine_rows

__all__ = ["farthest_first"]


def farthest_first(z: Float[Tensor, "b n d"], first: Int[Tensor, " b"], count: int) -> Int[Tensor, "b m"]:
    """`first`, then again and again the token whose most similar chosen token is the least similar: argmin_i max_c cos(z_i, z_c).

    `z` are unit vectors. The `count` <= n tokens are distinct and in the order in which they were chosen.
    """
    cosines = cosine_rows(z, count)
    chosen = first[:, None].repeat(1, count)
    nearest = torch.full(z.shape[:2], -torch.inf, device=z.device)
    for step in range(1, count):
        newest = chosen[:, step - 1]
        nearest = torch.maximum(nearest, cosines(newest))
        # a zero vector or one of many alike would be chosen twice
        nearest.scatter_(1, newest[:, None], torch.inf)
        chosen[:, step] = first_best(-nearest)
    return chosen
