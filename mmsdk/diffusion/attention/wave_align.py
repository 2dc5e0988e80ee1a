"""WaveAlign: rows of queries in an order in which those that run together, or one after the other, read the same blocks of keys.

Source: WaveAlign (abstract). Published: a low-rank singular value decomposition of the sparse mask's rows groups rows with similar access
to keys and values; within a wave rows are sorted by how many blocks they read, descending, so that a wave's short last rows are followed by
the next wave's long first ones and what they share is read again before it is evicted; where it does not pay, it is skipped. Only rows are
permuted: not a bit of the output changes, and no kernel.

Reconstruction: a wave is as many rows as run at one time; the sketch is a randomised decomposition of rank 8, 4 more for the draw, with one
power iteration; rows are grouped by halving them along the leading direction of their sketch, at a multiple of the wave, until a group is
one wave. Skipped, head by head, above a density of 0.65, where neighbours already read the same, and where the waves' unions would not
become smaller; and altogether where a head's keys and values fit into the cache.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Alignment", "WaveAlign", "united"]


@dataclass(frozen=True, slots=True)
class Alignment:
    """The order of the rows of every head, int32, and the mask that it was made for."""

    row_order: Int[Tensor, "b h rows"]
    mask: Bool[Tensor, "b h rows columns"]


@dataclass(frozen=True, slots=True)
class WaveAlign:
    """`wave` rows run together: the GPU's multiprocessors times the programs of each, 132 on an H100; `cache` are the bytes of its L2.

    `dense` and `alike` are the density, and the mean overlap of neighbours, from which a head is left as it is; an order is used again
    while no more than `changed` of a head's mask changed. `seed` is that of the sketch.
    """

    wave: int = 132
    cache: int = 50 * 2**20
    rank: int = 8
    dense: float = 0.65
    alike: float = 0.9
    changed: float = 0.02
    seed: int = 0

    def __call__(self, mask: Bool[Tensor, "b h rows columns"], working_set: int, before: Alignment | None = None) -> Alignment:
        """The order for a mask; `working_set` is the bytes of a head's keys and values. No value is read by the host."""
        natural = torch.arange(mask.shape[2], dtype=torch.int32, device=mask.device).expand(mask.shape[:3])
        if working_set <= self.cache or mask.shape[2] <= 1 or mask.shape[3] == 0:
            return Alignment(natural, mask)
        order = self._grouped(mask)
        skipped = (mask.float().mean((2, 3)) > self.dense) | (_overlap(mask) >= self.alike)
        skipped = skipped | (united(mask, order, self.wave) > united(mask, natural, self.wave))
        order = torch.where(skipped[..., None], natural, order)
        if before is None or before.mask.shape != mask.shape:
            return Alignment(order, mask)
        same = (before.mask != mask).float().mean((2, 3)) <= self.changed
        return Alignment(torch.where(same[..., None], before.row_order, order), torch.where(same[..., None, None], before.mask, mask))

    def _grouped(self, mask: Bool[Tensor, "b h rows columns"]) -> Int[Tensor, "b h rows"]:
        rows = mask.flatten(0, 1)
        sketch = _sketch(rows.float(), self.rank, self.seed)
        order = torch.arange(rows.shape[1], device=mask.device).expand(rows.shape[:2])
        spans = [(0, rows.shape[1])]
        while spans:
            low, high = spans.pop()
            if high - low <= self.wave:
                continue
            part = order[:, low:high]
            place = _leading(sketch.gather(1, part[..., None].expand(-1, -1, sketch.shape[2]))).argsort(dim=1, stable=True)
            order = torch.cat((order[:, :low], part.gather(1, place), order[:, high:]), 1)
            middle = low + -(-(high - low) // (2 * self.wave)) * self.wave
            spans += [(low, middle), (middle, high)]
        counts = rows.sum(-1).gather(1, order)
        wave = torch.arange(rows.shape[1], device=mask.device) // self.wave
        descending = (wave * (mask.shape[3] + 1) - counts).argsort(dim=1, stable=True)
        return order.gather(1, descending).to(torch.int32).view(mask.shape[:3])


def united(mask: Bool[Tensor, "b h rows columns"], order: Int[Tensor, "b h rows"], wave: int) -> Int[Tensor, "b h"]:
    """How many blocks the waves of a head read, each counted once a wave: what they fetch if a wave reads together and forgets."""
    placed = mask.gather(2, order.long()[..., None].expand(mask.shape))
    waves = F.pad(placed, (0, 0, 0, -mask.shape[2] % wave)).unflatten(2, (-1, wave))
    total: Tensor = waves.any(3).sum((2, 3))
    return total


def _sketch(rows: Float[Tensor, "n rows columns"], rank: int, seed: int) -> Float[Tensor, "n rows r"]:
    """U S of a randomised singular value decomposition."""
    most = min(rank + 4, *rows.shape[1:])
    draw = torch.randn(rows.shape[2], most, generator=torch.Generator().manual_seed(seed)).to(rows.device)
    range_of = rows @ (rows.transpose(1, 2) @ (rows @ draw))
    basis = torch.linalg.qr(range_of).Q
    left, values, _ = torch.linalg.svd(basis.transpose(1, 2) @ rows, full_matrices=False)
    sketch: Tensor = (basis @ left * values[:, None])[..., :rank]
    return sketch


def _leading(points: Float[Tensor, "n m r"]) -> Float[Tensor, "n m"]:
    """The coordinate along the direction in which points differ the most, its sign set by its largest component."""
    centred = points - points.mean(1, keepdim=True)
    direction = torch.linalg.eigh(centred.transpose(1, 2) @ centred).eigenvectors[..., -1]
    sign = direction.gather(1, direction.abs().argmax(1, keepdim=True)).sign()
    along: Tensor = (centred @ (direction * sign)[..., None])[..., 0]
    return along


def _overlap(mask: Bool[Tensor, "b h rows columns"]) -> Float[Tensor, "b h"]:
    """The mean Jaccard index of neighbouring rows; two empty rows read the same."""
    one, other = mask[:, :, :-1], mask[:, :, 1:]
    both, either = (one & other).sum(-1), (one | other).sum(-1)
    return torch.where(either > 0, both / either.clamp_min(1), 1.0).mean(-1)
