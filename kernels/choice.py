"""The rule by which kernels and their references choose: scores less than a millionth apart are equal, and the earlier one wins.

Sums come out a little different on another machine, in another batch or after another order of adding; a choice that hung on the last
bit would change with them. A kernel takes the largest score first, and then the earliest that is not below it by more than `TIE`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["TIE", "first_best", "top"]

# Scores closer than this are equal.
TIE = 1e-6


def first_best(scores: Float[Tensor, "*b n"]) -> Int[Tensor, "*b"]:
    """The earliest token whose score is the largest."""
    return (scores >= scores.amax(dim=-1, keepdim=True) - TIE).view(torch.uint8).argmax(dim=-1)


def top(scores: Float[Tensor, "*b n"], count: int) -> Int[Tensor, "*b m"]:
    """The `count` tokens of largest score, in ascending order of their index; of those equal to the last one chosen, the earlier ones."""
    if count == 0:
        return torch.empty(*scores.shape[:-1], 0, dtype=torch.int64, device=scores.device)
    last = scores.topk(count, dim=-1).values[..., -1:]
    tier = (scores >= last - TIE).to(torch.int8) + (scores > last + TIE).to(torch.int8)
    return tier.argsort(dim=-1, descending=True, stable=True)[..., :count].sort(dim=-1).values
