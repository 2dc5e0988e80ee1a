"""EVS, efficient video sampling: keep what changed since the frame before.

Source: EVS, arXiv 2510.14624. Published: the dissimilarity (one minus cosine) of each token to that at the same place of the frame before;
the first frame is kept whole; the rest by a stable sort. Published programs keep at least one whole frame. Ours: the budget is met exactly,
so where it is below one frame, as on any picture, the first frame has no order of its own and is thinned evenly; a token whose place was
empty in the frame before (an earlier method ran) counts as entirely new.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.plan import keep, reading_key
from mmsdk.tokencomp.ranking import top
from mmsdk.tokencomp.similarity import rows_at, unit
from mmsdk.tokencomp.stack import Stack, in_stacks
from mmsdk.tokencomp.stream import Held, appended
from mmsdk.tokencomp.types import Compressed, Side
from mmsdk.vision.types import VisualTokens

__all__ = ["EVS"]

# The largest cosine distance there is, for what has nothing to be compared with, and more than it, for the first frame.
NEW, FIRST = 2.0, 3.0


@dataclass(frozen=True, slots=True)
class EVS:
    """Prunes a clip by change; no knobs. Scores are the dissimilarities, those of the first frame above all others."""

    side: ClassVar[Side] = "before"
    asks: ClassVar[bool] = False

    def __call__(
        self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget], query: Sequence[Float[Tensor, "_ d"]] | None = None
    ) -> list[Compressed]:
        return in_stacks("evs", tokens, budgets, _choose)

    def held(self, count: int) -> Held:
        """A clip while its frames come; the same tokens as of the whole clip, scores within a millionth of each other aside."""
        return _Changed(count)


@dataclass(frozen=True, slots=True)
class _Changed:
    """The `count` tokens that changed most so far, their scores, and the directions of the last frame, which the next is compared with."""

    count: int
    tokens: tuple[VisualTokens, ...] = ()
    scores: tuple[Float[Tensor, " m"], ...] = ()
    last: tuple[Float[Tensor, "1 n d"], ...] = ()

    def push(self, tokens: VisualTokens) -> "_Changed":
        """Score these frames; of them and what is held the highest stay."""
        frames, rows, columns = tokens.grid
        z = unit(tokens.features).view(frames, rows * columns, -1)
        before = self.last or (torch.zeros_like(z[:1]),)
        change = 1 - (z * torch.cat([*before, z[:-1]])).sum(dim=2)
        if not self.last:
            change[:1] = FIRST + _spaced(torch.ones_like(change[:1], dtype=torch.bool), self.count)
        scores = torch.cat([*self.scores, change.flatten()])
        index = top(scores, min(self.count, len(scores)))
        kept = keep(appended(self.tokens, tokens), index, method="evs").tokens
        return _Changed(self.count, (kept,), (scores[index],), (z[-1:],))


def _choose(stack: Stack) -> list[Compressed]:
    positions = stack.positions()
    first = positions[..., 0] == positions[..., 0].amin(dim=1, keepdim=True)
    scores = _change(unit(stack.features()), positions, stack.grid).masked_fill(first, FIRST)
    return stack.keep(top(scores + _spaced(first, stack.count), stack.count), scores)


def _change(z: Float[Tensor, "b n d"], positions: Int[Tensor, "b n 3"], grid: tuple[int, int, int]) -> Float[Tensor, "b n"]:
    """One minus the cosine of each token to the one at the same place of the frame before."""
    frames, rows, columns = grid
    cell = reading_key(positions.flatten(0, 1), grid).unflatten(0, z.shape[:2])
    tokens = torch.arange(z.shape[1], device=z.device).expand_as(cell)
    # merged tokens can share a cell: the last of them stands for it, in any order of writing
    held = torch.full((len(z), frames * rows * columns), -1, device=z.device).scatter_reduce_(1, cell, tokens, "amax")
    # a frame of nothing goes before the first
    before = torch.cat([torch.full_like(held[:, : rows * columns], -1), held], dim=1).gather(1, cell)
    other = rows_at(z, before.clamp_min(0))
    return (1 - (z * other).sum(dim=2)).masked_fill(before < 0, NEW)


def _spaced(first: Bool[Tensor, "b n"], count: int) -> Float[Tensor, "b n"]:
    """1 for `count` evenly spaced tokens of the first frame, which are the first in reading order; 0 elsewhere."""
    size = first.sum(dim=1, keepdim=True)
    chosen = (torch.arange(count, device=first.device) * 2 + 1) * size // (2 * count)
    return torch.zeros(first.shape, device=first.device).scatter(1, chosen, 1.0)
