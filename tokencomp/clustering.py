"""Spherical k-means: groups of tokens that point the same way, from given seeds, without a group left empty.

Letters: b inputs side by side, n tokens, m groups.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.kernels.ops.assign_and_merge import assign_and_merge, nearest_centre
from mmsdk.tokencomp.ranking import place, ranked
from mmsdk.tokencomp.similarity import rows_at

__all__ = ["filled", "group_sizes", "spherical_kmeans"]


def spherical_kmeans(
    z: Float[Tensor, "b n d"], seeds: Int[Tensor, "b m"], *, rounds: int = 10, tolerance: float = 1e-6
) -> Int[Tensor, "b n"]:
    """The group in [0, m) of each unit vector; no group is empty.

    A round assigns every vector to the prototype of largest cosine and replaces each prototype by the normalised mean of its members; a
    prototype without members starts again at the vector that is covered worst. An input stops when no entry of its prototypes changes by
    more than `tolerance`. Groups are those of one more assignment to the final prototypes.
    """
    prototypes = rows_at(z, seeds)
    settled = torch.zeros(len(z), 1, 1, dtype=torch.bool, device=z.device)
    for _ in range(rounds):
        cosine, labels, means, sizes = assign_and_merge(z, prototypes, z)
        updated = _reseeded(F.normalize(means, dim=-1, eps=1e-6), sizes, z, cosine)
        change = (updated - prototypes).abs().amax(dim=(1, 2), keepdim=True)
        before, prototypes = prototypes, torch.where(settled, prototypes, updated)
        settled = settled | (change <= tolerance)
        # looking costs nothing on the processor; an accelerator would have to wait, and does the remaining rounds for nothing instead
        if z.device.type == "cpu" and bool(settled.all()):
            if torch.equal(before, prototypes):
                # one more assignment would be this one again
                return filled(labels, cosine, seeds.shape[1])
            break
    cosine, labels = nearest_centre(z, prototypes)
    return filled(labels, cosine, seeds.shape[1])


def group_sizes(labels: Int[Tensor, "b n"], count: int) -> Int[Tensor, "b m"]:
    """How many members each group has."""
    return torch.zeros(len(labels), count, dtype=torch.int64, device=labels.device).scatter_add_(1, labels, torch.ones_like(labels))


def _reseeded(
    prototypes: Float[Tensor, "b m d"], sizes: Float[Tensor, "b m"], z: Float[Tensor, "b n d"], cosine: Float[Tensor, "b n"]
) -> Float[Tensor, "b m d"]:
    """Prototypes with the empty ones moved, in order, to the vector that is covered worst, the second worst, and so on."""
    empty = sizes == 0
    if _known_none(empty):
        return prototypes
    turn = (empty.cumsum(dim=1) - 1).clamp_min(0)
    return torch.where(empty[..., None], rows_at(z, ranked(-cosine).gather(1, turn)), prototypes)


def filled(labels: Int[Tensor, "b n"], cosine: Float[Tensor, "b n"], count: int) -> Int[Tensor, "b n"]:
    """Labels with each empty group given the worst covered vector that is not the last of its own group.

    Taking away the worst first, what a group has left in the end is its best covered member; everyone else may be taken.
    """
    n = labels.shape[1]
    empty = group_sizes(labels, count) == 0
    if _known_none(empty):
        return labels
    turn = place(ranked(-cosine))
    stays = torch.zeros(len(labels), count, dtype=torch.int64, device=labels.device).scatter_reduce_(1, labels, turn, "amax")
    free = turn < stays.gather(1, labels)
    donors = (turn + n * ~free).argsort(dim=1)
    taken = donors.gather(1, (empty.cumsum(dim=1) - 1).clamp_min(0))
    # groups that have members write beyond the end, into a column that is cut off again
    room = torch.cat([labels, labels.new_zeros(len(labels), 1)], dim=1)
    groups = torch.arange(count, device=labels.device).expand_as(empty)
    return room.scatter_(1, torch.where(empty, taken, n), groups)[:, :n]


def _known_none(empty: Bool[Tensor, "b m"]) -> bool:
    """Whether no group is empty, so that there is nothing to rank: looked up on the processor alone, where looking costs nothing."""
    return empty.device.type == "cpu" and not bool(empty.any())
