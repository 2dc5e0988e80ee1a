"""SimpleCluster: a whole clip, or a picture, grouped by what is seen and where; each group becomes the mean of its tokens.

Source: SimpleCluster, arXiv 2609.35394. Published: it works behind the projector; for grouping alone the tokens are turned by a
three-dimensional RoPE; farthest-point seeds; at most 10 rounds of spherical k-means; the mean of the raw features; groups in the order of,
and at the place of, their earliest member. Ours: grids need not be square and a picture is a clip of one frame; a token that stands for
more patches weighs more in its group's mean (with equal weights, as published, it is the plain mean); a group that the last round leaves
empty, where the published program stops with an error, gets the worst covered token of a group that can spare it; and `place` can be
turned off, after which tokens are grouped by what is seen alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import PluginError
from mmsdk.kernels.ops.farthest_point import farthest_point
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.clustering import spherical_kmeans
from mmsdk.tokencomp.ranking import first_best, place
from mmsdk.tokencomp.similarity import unit
from mmsdk.tokencomp.stack import Stack, in_stacks
from mmsdk.tokencomp.types import Compressed, Side
from mmsdk.vision.types import VisualTokens

__all__ = ["SimpleCluster"]


@dataclass(frozen=True, slots=True)
class SimpleCluster:
    """At most `rounds` rounds of k-means; `base` is that of the rotary embedding by which `place` counts, as published."""

    side: ClassVar[Side] = "behind"
    asks: ClassVar[bool] = False

    rounds: int = 10
    base: float = 10000.0
    place: bool = True

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.base <= 1:
            raise PluginError(f"simplecluster needs at least one round and a base above 1, got rounds={self.rounds}, base={self.base}")

    def __call__(
        self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget], query: Sequence[Float[Tensor, "_ d"]] | None = None
    ) -> list[Compressed]:
        return in_stacks("simplecluster", tokens, budgets, self._group)

    def _group(self, stack: Stack) -> list[Compressed]:
        x = stack.features().float()
        z = unit(_turned(x, stack.positions(), stack.grid, self.base) if self.place else x)
        # the token of largest norm comes first: the first one, as all norms are now alike, unless it is zero
        seeds = farthest_point(z, first_best(z.norm(dim=2)), stack.count)
        labels, first = _by_first_member(spherical_kmeans(z, seeds, rounds=self.rounds), stack.count)
        return stack.merge(labels, at=first)


def _turned(x: Float[Tensor, "b n d"], positions: Int[Tensor, "b n 3"], grid: tuple[int, int, int], base: float) -> Float[Tensor, "b n d"]:
    """RoPE over (t, y, x): a third of the channels for each axis, what is left over for time; neighbouring channels turn together."""
    third = x.shape[2] // 3
    parts = x.split([x.shape[2] - 2 * third, third, third], dim=2)
    turned = [_turned_along(part, positions[..., axis], grid[axis], base) for axis, part in enumerate(parts)]
    return torch.cat(turned, dim=2)


def _turned_along(x: Float[Tensor, "b n e"], position: Int[Tensor, "b n"], side: int, base: float) -> Float[Tensor, "b n e"]:
    pairs = x.shape[2] // 2
    frequency = base ** -(torch.arange(pairs, device=x.device) / max(pairs, 1))
    # of the few places that there are, not of every token
    angle = torch.arange(side, device=x.device)[:, None] * frequency
    turns = torch.view_as_complex(torch.stack([angle.cos(), angle.sin()], dim=2)[position])
    # a copy, since a complex number begins at an even place
    points = torch.view_as_complex(x[..., : 2 * pairs].unflatten(2, (pairs, 2)).clone(memory_format=torch.contiguous_format))
    # an odd channel at the end has no partner and stays
    return torch.cat([torch.view_as_real(points * turns).flatten(2), x[..., 2 * pairs :]], dim=2)


def _by_first_member(labels: Int[Tensor, "b n"], count: int) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b m"]]:
    """The same groups, numbered by their earliest members, and those members."""
    tokens = torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
    first = torch.full((len(labels), count), labels.shape[1], device=labels.device).scatter_reduce_(1, labels, tokens, "amin")
    order = first.argsort(dim=1)
    return place(order).gather(1, labels), first.gather(1, order)
