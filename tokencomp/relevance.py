"""How near visual tokens are to a question, where both are vectors of one space.

`query` holds, for each input, the embeddings of its question's tokens, in the space of the visual tokens (such as CLIP's joint space, or
the language model's where the tokens have been projected into it). Inputs side by side may have been asked different questions.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.tokencomp.similarity import unit

__all__ = ["cosine_to_mean", "mean_cosine"]


def mean_cosine(z: Float[Tensor, "b n d"], query: Sequence[Float[Tensor, "_ e"]]) -> Float[Tensor, "b n"]:
    """The cosine of each unit vector to each token of its question, mean over the question. Raises InputError where the widths differ."""
    return _products(z, [unit(_fitting(z, question)).mean(dim=0) for question in query])


def cosine_to_mean(z: Float[Tensor, "b n d"], query: Sequence[Float[Tensor, "_ e"]]) -> Float[Tensor, "b n"]:
    """The cosine of each unit vector to the mean of its question's tokens. Raises InputError where the widths differ."""
    return _products(z, [unit(_fitting(z, question).float().mean(dim=0)) for question in query])


def _products(z: Float[Tensor, "b n d"], directions: Sequence[Float[Tensor, " d"]]) -> Float[Tensor, "b n"]:
    return torch.bmm(z, torch.stack(list(directions))[..., None])[..., 0]


def _fitting(z: Tensor, question: Tensor) -> Tensor:
    if question.shape[0] == 0 or question.shape[1] != z.shape[2]:
        raise InputError(
            f"{tuple(question.shape)} does not fit visual tokens of width {z.shape[2]}; give at least one embedding of the question in "
            "the space of the visual tokens, or no query at all",
            item="query",
        )
    return question
