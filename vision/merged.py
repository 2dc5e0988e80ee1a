"""What is left of a view whose transformer was shortened, and how the views of an input come together again.

Letters: b views of one batch, u squares of patches of a view (patches, where a token is made of one), m tokens left, d width, e width of a
key.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import BudgetError
from mmsdk.vision.shorten import Area, Groups, Shortened, Shortener, Shortening
from mmsdk.vision.types import VisualTokens

__all__ = ["Merged", "planned", "together"]


@dataclass(frozen=True, slots=True)
class Merged:
    """One view: its tokens in reading order, the squares in each and where their middle is, and the token (-1: none) and score of each
    square."""

    features: Float[Tensor, "m d"]
    saliency: Float[Tensor, " m"]
    keys: Float[Tensor, "m e"]
    weight: Float[Tensor, " m"]
    places: Int[Tensor, "m 2"]
    owner: Int[Tensor, " u"]
    scores: Float[Tensor, " u"]
    deep: tuple[Float[Tensor, "m d"], ...] = ()

    @staticmethod
    def of(
        features: Float[Tensor, "b m d"],
        saliency: Float[Tensor, "b m"],
        keys: Float[Tensor, "b m e"],
        groups: Groups,
        columns: int,
        deep: Sequence[Float[Tensor, "b m d"]] = (),
    ) -> "list[Merged]":
        """Each of a batch, whose groups are of tokens alone, on a grid so many columns wide."""
        places = groups.centres(columns)
        order = (places[..., 0] * columns + places[..., 1]).argsort(dim=1, stable=True)
        tensors = (features, saliency, keys, groups.size, places, *deep)
        sorted_ = [x.gather(1, order.view(*order.shape, *[1] * (x.ndim - 2)).expand_as(x)) for x in tensors]
        owner = order.argsort(dim=1).gather(1, groups.owner)
        scores = torch.zeros_like(owner, dtype=torch.float32)
        parts = zip(*sorted_[:5], owner, scores, strict=True)
        layers = zip(*sorted_[5:], strict=True) if deep else [()] * len(owner)
        return [
            Merged(kept, seen, key, size, place, own, score, tuple(layer))
            for (kept, seen, key, size, place, own, score), layer in zip(parts, layers, strict=True)
        ]

    @staticmethod
    def pruned(
        features: Float[Tensor, "b m d"], saliency: Float[Tensor, "b m"], keys: Float[Tensor, "b m e"], groups: Groups, columns: int
    ) -> "list[Merged]":
        """The same where patches were removed, and those that are left, in reading order, fill the rows to different lengths."""
        assert groups.ran is not None, "rows that were pruned say how long each patch ran"
        rows = zip(groups.lengths, features, saliency, keys, groups.owner, groups.ran, strict=True)
        found = []
        for m, x, attention, key, owner, ran in rows:
            stays = (owner >= 0).nonzero()[:, 0]
            places = torch.stack((stays // columns, stays % columns), dim=1)
            weight, own = torch.ones(m, device=ran.device), (owner - groups.first).clamp_min(-1)
            found.append(Merged(x[:m], attention[:m], key[:m], weight, places, own, ran))
        return found


def planned(areas: Sequence[Area], by: Shortener, count: int, depth: int) -> list[Shortening]:
    """How views come to `count` tokens together, each to a part of them like its part of all squares, and to one at least.

    Raises BudgetError where a view would have no token, or the method cannot get there in `depth` blocks.
    """
    squares = [area.count for area in areas]
    least = [min(1, number) for number in squares]
    if count < sum(least):
        raise BudgetError(f"each of {sum(least)} views is shortened by itself, and {count} tokens leave some of them none")
    spare, more = max(1, sum(squares) - sum(least)), count - sum(least)
    ends = [more * done // spare for done in accumulate((all_ - one for all_, one in zip(squares, least, strict=True)), initial=0)]
    parts = [one + end - start for one, start, end in zip(least, ends, ends[1:], strict=False)]
    plans = {(number, part): by.plan(number, part, depth) if part < number else () for number, part in zip(squares, parts, strict=True)}
    return [Shortening(by, plans[area.count, part], (area,)) for area, part in zip(areas, parts, strict=True)]


def together(
    views: Sequence[Merged],
    places: Sequence[Int[Tensor, "_ 3"]],
    squares: Sequence[Int[Tensor, "_ 3"]],
    grid: tuple[int, int, int],
    times: Float[Tensor, " t"],
) -> Shortened:
    """An input from its views, in reading order of its grid; `places` are of the tokens of each view there, `squares` of what made them."""
    starts = accumulate((len(view.weight) for view in views), initial=0)
    owner = torch.cat([torch.where(view.owner < 0, -1, start + view.owner) for start, view in zip(starts, views, strict=False)])
    here, from_ = torch.cat(list(places)), torch.cat(list(squares))
    order, read = (_reading(x, grid) for x in (here, from_))
    deep = [torch.cat(layer)[order] for layer in zip(*(view.deep for view in views), strict=True)]
    tokens = VisualTokens(
        features=torch.cat([view.features for view in views])[order],
        positions=here[order],
        weight=torch.cat([view.weight for view in views])[order],
        grid=grid,
        times=times.to(here.device),
        saliency=torch.cat([view.saliency for view in views])[order],
        keys=torch.cat([view.keys for view in views])[order],
        deep=tuple(deep),
    )
    there = order.argsort()[owner.clamp_min(0)].masked_fill(owner < 0, -1)
    return Shortened(tokens, from_[read], there[read], torch.cat([view.scores for view in views])[read])


def _reading(places: Int[Tensor, "m 3"], grid: tuple[int, int, int]) -> Int[Tensor, " m"]:
    return ((places[:, 0] * grid[1] + places[:, 1]) * grid[2] + places[:, 2]).argsort(stable=True)
