"""Principal directions of the cells of each grid: the eigenvectors of how tokens at two places go together, for braco's basis "pca"."""

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.apps.train_mini.features import Shard
from mmsdk.models.mini.family import Mini
from mmsdk.tokencomp.transform import Grid

__all__ = ["directions"]


@torch.no_grad()
def directions(vlm: Mini, shard: Shard, most: int = 64, samples: int = 128) -> dict[Grid, Float[Tensor, "k n"]]:
    """The `most` leading eigenvectors, a row each, of sum X X^T over the first `samples` inputs of every grid.

    Not centred: what is to be kept is X itself, mean and all.
    """
    found: dict[Grid, Float[Tensor, "k n"]] = {}
    grids = [(grid[0], grid[1], grid[2]) for grid in shard.grids.tolist()]
    for grid in sorted(set(grids)):
        rows = [i for i, one in enumerate(grids) if one == grid][:samples]
        x = torch.stack(vlm.connect([shard.tokens(i) for i in rows])).double()
        vectors = torch.linalg.eigh(torch.einsum("bnd,bmd->nm", x, x)).eigenvectors
        found[grid] = vectors.flip(1)[:, :most].T.float()
    return found
