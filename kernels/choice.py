"""The rule by which kernels and their references choose: scores less than a millionth apart are equal, and the earlier one wins.

Sums come out a little different on another machine, in another batch or after another order of adding; a choice that hung on the last
bit would change with them. A kernel takes the largest score first, and then the earliest that is not below it by more than `TIE`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["TIE", "first_best"]

# Scores closer than this are equal.
TIE = 1e-6


def first_best(scores: Float[Tensor, "*b n"]) -> Int[Tensor, "*b"]:
    """The earliest token whose score is the largest."""
    return (scores >= scores.amax(dim=-1, keepdim=True) - TIE).view(torch.uint8).argmax(dim=-1)
