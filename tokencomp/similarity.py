"""Cosines between tokens, in slices: no matrix of all tokens by all tokens is held where it would be large, however long the clip.

Vectors are scaled to length 1 in float32 first, so that a cosine is a product. A zero vector has cosine 0 to everything.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.tokencomp.ranking import first_best

__all__ = ["ENTRIES", "best_match", "cosine_rows", "few", "nearest_other", "rows_at", "unit"]

# Entries of a matrix over pairs, or of a slice of it, that may exist at one time: 8 MiB in float32.
ENTRIES = 2**21


def unit(x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """Vectors of length 1 in the same directions, in float32; zero stays zero."""
    # the squares of large entries are beyond float32, and not every device has more than that
    tiny, x = torch.finfo(torch.float32).tiny, x.float()
    x = x / x.abs().amax(dim=-1, keepdim=True).clamp_min(tiny)
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.clamp_min(tiny)


def rows_at(z: Float[Tensor, "b n d"], index: Int[Tensor, "b m"]) -> Float[Tensor, "b m d"]:
    """The vectors of the tokens at `index`."""
    flat = index + torch.arange(len(z), device=z.device)[:, None] * z.shape[1]
    return z.flatten(0, 1).index_select(0, flat.flatten()).view(*index.shape, z.shape[2])


def few(b: int, n: int) -> bool:
    """Whether the matrices of n tokens by n tokens of b inputs are small enough to be held whole, all at one time."""
    return b * n * n <= ENTRIES


def cosine_rows(z: Float[Tensor, "b n d"], count: int) -> Callable[[Int[Tensor, " b"]], Float[Tensor, "b n"]]:
    """A function from one token of each input to its cosines to all tokens, made to be called `count` times.

    Where tokens are few and many rows are wanted, all are computed at once: one large product is faster than as many small ones.
    """
    rows = torch.arange(len(z), device=z.device)
    if few(*z.shape[:2]) and 16 * count >= z.shape[1]:
        whole = z @ z.transpose(1, 2)
        return lambda token: whole[rows, token]
    return lambda token: torch.bmm(z, z[rows, token, :, None])[..., 0]


def best_match(
    z: Float[Tensor, "b n d"], to: Float[Tensor, "b m d"], apart: Bool[Tensor, "b n m"] | None = None
) -> tuple[Float[Tensor, "b n"], Int[Tensor, "b n"]]:
    """For each unit vector of `z` its cosine to the most similar of `to`, and which that is (the earlier among equals).

    Pairs that are `apart` match only where a vector is apart from all.
    """
    rows = max(1, ENTRIES // (to.shape[0] * to.shape[1]))
    target = to.transpose(1, 2)
    values, indices = [], []
    for start in range(0, z.shape[1], rows):
        cosine = z[:, start : start + rows] @ target
        # cosines lie in [-1, 1], so that 4 less puts every pair that is apart behind every other
        ranking = cosine if apart is None else cosine - 4.0 * apart[:, start : start + rows]
        index = first_best(ranking)
        values.append(cosine.gather(2, index[..., None])[..., 0])
        indices.append(index)
    return torch.cat(values, dim=1), torch.cat(indices, dim=1)


def nearest_other(z: Float[Tensor, "b n d"]) -> Float[Tensor, "b n"]:
    """The cosine of each unit vector to the most similar other one; -inf for a vector that is alone."""
    rows = max(1, ENTRIES // (z.shape[0] * z.shape[1]))
    target = z.transpose(1, 2)
    found = []
    for start in range(0, z.shape[1], rows):
        cosine = z[:, start : start + rows] @ target
        cosine.diagonal(offset=start, dim1=1, dim2=2).fill_(-torch.inf)
        found.append(cosine.amax(dim=2))
    return torch.cat(found, dim=1)
