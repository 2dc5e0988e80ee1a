"""What has a closed form: principal directions of the cells of each grid, for braco's basis "pca", and where the scoring vector starts.

The principal directions are the eigenvectors of how tokens at two places go together.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mmsdk.apps.train_braco.sets import Media
from mmsdk.apps.train_mini.features import Shard, cells_of
from mmsdk.models.mini.family import Mini
from mmsdk.tokencomp.transform import Grid

__all__ = ["apart", "directions"]


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


@torch.no_grad()
def apart(vlm: Mini, shard: Shard, media: Media, samples: int = 300) -> Float[Tensor, " d"]:
    """Fisher's discriminant between tokens of cells on things and all others, so long that the others' scores deviate by 1.

    Residual tokens that pool by it begin at what pictures are asked about. Of the first `samples` inputs of the medium with things in
    them; all zeros where there are none.
    """
    chosen = [i for i, grid in enumerate(shard.grids.tolist()) if (grid[0] > 1) == (media == "clip") and _on_things(shard, i).any()]
    if not chosen:
        return torch.zeros(vlm.decoder.config.width)
    x = torch.cat([vlm.connect([shard.tokens(i)])[0].double() for i in chosen[:samples]])
    on = torch.cat([_on_things(shard, i) for i in chosen[:samples]])
    spread = torch.cov(x.T, correction=0)
    spread.diagonal().add_(0.1 * float(spread.diagonal().mean()) + 1e-9)
    found = torch.linalg.solve(spread, x[on].mean(dim=0) - x[~on].mean(dim=0))
    direction: Tensor = (found / (x[~on] @ found).std().clamp_min(1e-9)).float()
    return direction


def _on_things(shard: Shard, i: int) -> Bool[Tensor, " n"]:
    on = torch.zeros(int(shard.counts[i]), dtype=torch.bool)
    on[[cell for cell, _ in cells_of(shard.samples[i], shard.grids[i].tolist())]] = True
    return on
