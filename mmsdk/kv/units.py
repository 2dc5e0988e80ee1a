"""Units of what was read (a frame, a stretch of words), what they are worth, and which tokens go (`mmsdk.kv.policies.omnitide`).

Tokens stand in the order of their positions here, those that are none in front. A unit is a run of tokens with one number.

Letters: b rows, t tokens; units are numbered 0 to t - 1 at most, so that what is told of them is [b t] too.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["Picking", "edges", "numbered", "parted", "picked", "scored"]


@dataclass(frozen=True, slots=True)
class Picking:
    """How units are judged: weights of words and of what is seen, the share that stays of a thinned unit, its loss with every newer one."""

    weights: tuple[float, float]
    share: float
    decay: float


def numbered(unit: Int[Tensor, "b t"], valid: Bool[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """Units by dense numbers in their order; what is no token has that of the first."""
    before = torch.cat((torch.full_like(unit[:, :1], -1), unit[:, :-1]), dim=1)
    begins = valid & ((unit != before) | ~torch.cat((torch.zeros_like(valid[:, :1]), valid[:, :-1]), dim=1))
    return (begins.cumsum(1) - 1).clamp_min(0)


def parted(positions: Int[Tensor, "b t"], kinds: Int[Tensor, "b t"], most: int) -> Int[Tensor, "b t"]:
    """The units of a prompt, ascending: runs of one kind, in parts of at most `most` tokens."""
    valid = positions >= 0
    run, place = numbered(kinds, valid), valid.cumsum(1) - 1
    begin = torch.full_like(place, place.shape[1]).scatter_reduce_(1, run, place.where(valid, place.shape[1]), "amin")
    return (run << 32) + (place - begin.gather(1, run)).clamp_min(0) // most


def edges(unit: Int[Tensor, "b t"], valid: Bool[Tensor, "b t"]) -> Bool[Tensor, "b t"]:
    """The first and the last token of each unit."""
    apart = (unit[:, 1:] != unit[:, :-1]) | ~valid[:, :-1]
    end = torch.ones_like(valid[:, :1])
    return valid & (torch.cat((end, apart), 1) | torch.cat((apart, end), 1))


def scored(
    unit: Int[Tensor, "b t"], valid: Bool[Tensor, "b t"], mass: Float[Tensor, "b t"], kind: Int[Tensor, "b t"], picking: Picking
) -> Float[Tensor, "b t"]:
    """w_kind * (mean attention of its tokens) * decay^age for each unit, the newest of which has age 0; -inf where there is no unit."""
    sizes = _sums(unit, valid.float())
    weights = torch.tensor(picking.weights, device=unit.device)[kind.clamp(0, 1)]
    worth = _sums(unit, (mass * weights).masked_fill(~valid, 0)) / sizes.clamp_min(1)
    age = unit.amax(1, keepdim=True) - torch.arange(unit.shape[1], device=unit.device)
    return (worth * picking.decay ** age.clamp_min(0)).masked_fill(sizes == 0, -torch.inf)


def picked(
    unit: Int[Tensor, "b t"],
    valid: Bool[Tensor, "b t"],
    pinned: Bool[Tensor, "b t"],
    mass: Float[Tensor, "b t"],
    score: Float[Tensor, "b t"],
    keep: Int[Tensor, " b"],
    share: float,
) -> Bool[Tensor, "b t"]:
    """Which tokens stay: `keep` of a row, or all that are pinned where these are more.

    First the units of least score are thinned, as many as it takes: their edges stay and of the others those of most mass, `share` of the
    unit in all. Only when every unit is thin are units dropped, again those of least score. Of the last unit that has to give way so much
    stays as there is room for. What is pinned stays in any case.
    """
    loose = valid & ~pinned
    size, hard = _sums(unit, loose.float()), _sums(unit, (loose & edges(unit, valid)).float())
    thin = torch.minimum(torch.maximum((size * share).ceil(), hard), size)
    order = score.masked_fill(size == 0, torch.inf).argsort(dim=1, stable=True)
    over = (valid.sum(1) - keep)[:, None].float()
    thinned = _freed(order, size - thin, over)
    stays = size - thinned - _freed(order, thin, over - thinned.sum(1, keepdim=True))
    first = torch.where(edges(unit, valid), torch.inf, mass).masked_fill(~loose, -torch.inf)
    return pinned & valid | (loose & (_rank(unit, first) < stays.gather(1, unit)))


def _sums(unit: Int[Tensor, "b t"], of: Float[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """By unit."""
    return torch.zeros_like(of).scatter_add_(1, unit, of)


def _freed(order: Int[Tensor, "b t"], most: Float[Tensor, "b t"], over: Float[Tensor, "b 1"]) -> Float[Tensor, "b t"]:
    """What each unit gives up, in this order and at most so much each, until there is enough."""
    can = most.gather(1, order)
    gives = torch.minimum((over - can.cumsum(1) + can).clamp_min(0), can)
    return torch.zeros_like(most).scatter_(1, order, gives)


def _rank(unit: Int[Tensor, "b t"], value: Float[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """The place of each token in its unit, the largest value first, of equal ones the earlier."""
    down = value.argsort(dim=1, descending=True, stable=True)
    order = down.gather(1, unit.gather(1, down).argsort(dim=1, stable=True))
    sizes = torch.zeros_like(unit).scatter_add_(1, unit, torch.ones_like(unit))
    begin = (sizes.cumsum(1) - sizes).gather(1, unit)
    places = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order).contiguous())
    return places - begin
