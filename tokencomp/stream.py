"""Clips that come frame by frame, in bounded memory: what a method holds between one run of frames and the next.

Two forms. A method whose choice can be made as frames come says so itself (`Streamed`), and then holds exactly what it would keep of the
whole clip: EVS, whose scores look one frame back. Every other method runs again whenever more is held than may be (`Reduced`): the clip
is as it came until then, and beyond that merged groups are merged again and what was dropped stays dropped. No stream form of these
methods is published; merging what was merged is ours, after the merge-and-reduce of streaming clustering.

Letters: n tokens of a run of frames, m held.
"""

import dataclasses
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.tokencomp.plan import merge
from mmsdk.tokencomp.types import Compressor
from mmsdk.vision.types import VisualTokens
from mmsdk.vision.values import shown, whole

__all__ = ["Held", "Planner", "Reduced", "Streamed", "appended", "form", "regrouped"]


@runtime_checkable
class Held(Protocol):
    """What is held of a clip so far, as a value: `push` gives what is held afterwards and leaves this one as it is."""

    def push(self, tokens: VisualTokens) -> "Held":
        """Take in a run of whole frames, in order, none of whose tokens is missing."""
        ...

    @property
    def tokens(self) -> tuple[VisualTokens, ...]:
        """The tokens held, on the grid of the whole clip so far; none before the first frame."""
        ...


@runtime_checkable
class Streamed(Protocol):
    """A compressor that can choose as frames come."""

    def held(self, count: int) -> Held:
        """What it holds before the first frame; of a whole clip it will hold what a budget of `count` keeps."""
        ...


@runtime_checkable
class Planner(Protocol):
    """What a method would make of one input at a budget: the group of every token in [0, count), or -1 where it is dropped."""

    def __call__(self, tokens: VisualTokens, count: int) -> Int[Tensor, " n"]: ...


@dataclass(frozen=True, slots=True)
class Reduced:
    """A clip of at most `most` tokens as it came; of a longer one, half as many whenever there would be more."""

    plan: Planner
    most: int
    tokens: tuple[VisualTokens, ...] = ()

    def push(self, tokens: VisualTokens) -> "Reduced":
        """Append, and reduce once where that is too much."""
        joined = appended(self.tokens, tokens)
        if len(joined) > self.most:
            joined = regrouped(joined, self.plan(joined, self.most // 2), self.most // 2)
        return dataclasses.replace(self, tokens=(joined,))


def appended(before: tuple[VisualTokens, ...], after: VisualTokens) -> VisualTokens:
    """Two parts of one clip as one, the second after the first in time. Raises InputError where their grids differ."""
    if not before:
        return after
    (first,) = before
    if first.grid[1:] != after.grid[1:]:
        raise InputError(
            f"frames of {after.grid[1:]} tokens cannot follow frames of {first.grid[1:]}; give frames of one size", item="frames"
        )
    later = after.positions + torch.tensor([first.grid[0], 0, 0], device=after.positions.device)
    return VisualTokens(
        features=torch.cat([first.features, after.features]),
        positions=torch.cat([first.positions, later]),
        weight=torch.cat([first.weight, after.weight]),
        grid=(first.grid[0] + after.grid[0], *after.grid[1:]),
        times=torch.cat([first.times, after.times]),
        saliency=torch.cat([first.saliency, after.saliency]),
        keys=None if first.keys is None or after.keys is None else torch.cat([first.keys, after.keys]),
        deep=tuple(torch.cat(parts) for parts in zip(first.deep, after.deep, strict=True)),
    )


def regrouped(tokens: VisualTokens, group: Int[Tensor, " n"], count: int) -> VisualTokens:
    """The mean of each group in [0, count), none of them empty, at the place of its earliest member; tokens of group -1 are gone."""
    here = torch.arange(len(tokens), device=group.device).masked_fill(group < 0, len(tokens))
    first = torch.full((count,), len(tokens), device=group.device).scatter_reduce_(0, group.clamp_min(0), here, "amin")
    return merge(tokens, group, count, method="stream", at=first).tokens


def form(method: Compressor, plan: Planner, most: int) -> Held:
    """The stream form of a method that may hold `most` tokens. Raises InputError where that is too few to be halved."""
    if not whole(most, 2):
        raise InputError(f"a stream that holds {shown(most)} tokens can keep nothing to merge into; hold 2 or more", item="hold")
    return method.held(most) if isinstance(method, Streamed) else Reduced(plan, most)
