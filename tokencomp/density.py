"""Density peaks: tokens that have close neighbours and are far from any token that has closer ones.

Rodriguez and Laio, "Clustering by fast search and find of density peaks" (2014), with the density of a token taken from its nearest
neighbours, as compressors use it. Ties in density go to the earlier token; nothing is drawn at random.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.tokencomp.ranking import TIE
from mmsdk.tokencomp.similarity import ENTRIES

__all__ = ["density_peaks"]


def density_peaks(
    x: Float[Tensor, "b n d"], group: Int[Tensor, "b n"], alive: Bool[Tensor, "b n"], *, groups: int, neighbours: int
) -> Float[Tensor, "b n"]:
    """density x distance of each token among the `alive` ones of its group; 0 for those that are not alive.

    Distances are Euclidean over sqrt(d). Density is exp(-mean squared distance to the `neighbours` nearest, the token itself included);
    the distance is that to the nearest denser token, or the largest of the group where there is none.
    """
    b, n, _ = x.shape
    rows = max(1, ENTRIES // (b * n))
    starts = range(0, n, rows)
    slices = [_spread(_distances(x, group, alive, start, rows), neighbours) for start in starts]
    density, farthest = (torch.cat(column, dim=1) for column in zip(*slices, strict=True))
    farthest = farthest.masked_fill(~alive, 0.0)
    widest = x.new_zeros(b, groups).scatter_reduce_(1, group, farthest, "amax").gather(1, group)
    reach = torch.cat([_reach(_distances(x, group, alive, start, rows), density, start) for start in starts], dim=1)
    return (density * torch.minimum(reach, widest)).masked_fill(~alive, 0.0)


def _distances(
    x: Float[Tensor, "b n d"], group: Int[Tensor, "b n"], alive: Bool[Tensor, "b n"], start: int, rows: int
) -> Float[Tensor, "b r n"]:
    """Distances of a slice of tokens to all; infinite to other groups and to tokens that are not alive."""
    part = slice(start, start + rows)
    # one way of computing for any size, so that a token's distances do not depend on the batch around it
    distance: Tensor = torch.cdist(x[:, part], x, compute_mode="use_mm_for_euclid_dist") / x.shape[2] ** 0.5
    distance.diagonal(offset=start, dim1=1, dim2=2).zero_()
    return distance.masked_fill((group[:, part, None] != group[:, None]) | ~alive[:, None], torch.inf)


def _spread(distance: Float[Tensor, "b r n"], neighbours: int) -> tuple[Float[Tensor, "b r"], Float[Tensor, "b r"]]:
    """The density of each token of a slice, and the distance of the farthest token of its group."""
    near = distance.topk(min(neighbours, distance.shape[2]), dim=2, largest=False).values
    there = near.isfinite()
    mean = near.square().masked_fill(~there, 0.0).sum(dim=2) / there.sum(dim=2).clamp_min(1)
    return (-mean).exp(), distance.masked_fill(distance.isinf(), 0.0).amax(dim=2)


def _reach(distance: Float[Tensor, "b r n"], density: Float[Tensor, "b n"], start: int) -> Float[Tensor, "b r"]:
    """The distance of each token of a slice to the nearest denser one; infinite where there is none."""
    here = torch.arange(distance.shape[2], device=distance.device)
    mine, place = density[:, start : start + distance.shape[1], None], here[start : start + distance.shape[1], None]
    denser = (density[:, None] > mine + TIE) | ((density[:, None] >= mine - TIE) & (here < place))
    return distance.masked_fill(~denser, torch.inf).amin(dim=2)
