"""How near visual tokens are to a question, where both are vectors of one space.

`query` holds the embeddings of the question's tokens, in the space of the visual tokens (such as CLIP's joint space, or the language
model's where the tokens have been projected into it).
"""

from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.tokencomp.similarity import unit

__all__ = ["cosine_to_mean", "mean_cosine"]


def mean_cosine(z: Float[Tensor, "b n d"], query: Float[Tensor, "q e"]) -> Float[Tensor, "b n"]:
    """The cosine of each unit vector to each query token, mean over the query. Raises InputError where the widths differ."""
    return z @ unit(_fitting(z, query)).mean(dim=0)


def cosine_to_mean(z: Float[Tensor, "b n d"], query: Float[Tensor, "q e"]) -> Float[Tensor, "b n"]:
    """The cosine of each unit vector to the mean of the query tokens. Raises InputError where the widths differ."""
    return z @ unit(_fitting(z, query).float().mean(dim=0))


def _fitting(z: Tensor, query: Tensor) -> Tensor:
    if query.shape[0] == 0 or query.shape[1] != z.shape[2]:
        raise InputError(
            f"{tuple(query.shape)} does not fit visual tokens of width {z.shape[2]}; give at least one embedding of the question in "
            "the space of the visual tokens, or no query at all",
            item="query",
        )
    return query
