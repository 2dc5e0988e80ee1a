"""Cosines between tokens, in slices: no matrix of all tokens by all tokens is held where it would be large, however long the clip.

Vectors are scaled to length 1 in float32 first, so that a cosine is a product. A zero vector has cosine 0 to everything.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.kernels.choice import first_best
from mmsdk.kernels.ops.assign_and_merge import nearest_centre
from mmsdk.kernels.ops.gather import gather
from mmsdk.kernels.ops.pair_similarity import pair_similarity
from mmsdk.kernels.pairs import ENTRIES, few

__all__ = ["ENTRIES", "best_match", "few", "nearest_other", "rows_at", "unit"]


def unit(x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """Vectors of length 1 in the same directions, in float32; zero stays zero."""
    # the squares of large entries are beyond float32, and not every device has more than that
    tiny, x = torch.finfo(torch.float32).tiny, x.float()
    x = x / x.abs().amax(dim=-1, keepdim=True).clamp_min(tiny)
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.clamp_min(tiny)


def rows_at(z: Float[Tensor, "b n d"], index: Int[Tensor, "b m"]) -> Float[Tensor, "b m d"]:
    """The vectors of the tokens at `index`."""
    return gather(z, index)


def best_match(
    z: Float[Tensor, "b n d"], to: Float[Tensor, "b m d"], apart: Bool[Tensor, "b n m"] | None = None
) -> tuple[Float[Tensor, "b n"], Int[Tensor, "b n"]]:
    """For each unit vector of `z` its cosine to the most similar of `to`, and which that is (the earlier among equals).

    Pairs that are `apart` match only where a vector is apart from all.
    """
    if apart is None:
        return nearest_centre(z, to)
    rows = max(1, ENTRIES // (to.shape[0] * to.shape[1]))
    values, indices = [], []
    for start in range(0, z.shape[1], rows):
        cosine = pair_similarity(z[:, start : start + rows], to)
        # cosines lie in [-1, 1], so that 4 less puts every pair that is apart behind every other
        index = first_best(cosine - 4.0 * apart[:, start : start + rows])
        values.append(cosine.gather(2, index[..., None])[..., 0])
        indices.append(index)
    return torch.cat(values, dim=1), torch.cat(indices, dim=1)


def nearest_other(z: Float[Tensor, "b n d"]) -> Float[Tensor, "b n"]:
    """The cosine of each unit vector to the most similar other one; -inf for a vector that is alone."""
    rows = max(1, ENTRIES // (z.shape[0] * z.shape[1]))
    found = []
    for start in range(0, z.shape[1], rows):
        cosine = pair_similarity(z[:, start : start + rows], z)
        cosine.diagonal(offset=start, dim1=1, dim2=2).fill_(-torch.inf)
        found.append(cosine.amax(dim=2))
    return torch.cat(found, dim=1)
