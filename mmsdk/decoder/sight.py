"""Who sees what beyond what stands before: prompts that are read whole, pictures whose tokens see one another, layers with a short memory.

    "before"    a token sees itself and what stands before it
    "pictures"  the tokens of a picture also see each other (Gemma 3, arXiv 2503.19786)
    "prompt"    all of a prompt sees all of it, what is said then only what stands before (prefix-LM; PaliGemma, arXiv 2407.07726)

Letters: b rows of the batch, s tokens of the pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from mmsdk.decoder.spans import Span

__all__ = ["Local", "Sees", "reaching", "together"]

Sees = Literal["before", "pictures", "prompt"]


@dataclass(frozen=True, slots=True)
class Local:
    """Layers that attend to the last `window` positions alone, and turn heads by a base of their own; none by default."""

    layers: tuple[int, ...] = ()
    window: int = 1
    theta: float = 10_000.0


def together(sees: Sees, row: Sequence[Span]) -> tuple[range, ...]:
    """The tokens of a prompt that see what comes after them, in runs that go through a decoder in one piece."""
    ends = list(accumulate((span.counts[0] for span in row), initial=0))
    if sees == "before":
        return ()
    if sees == "prompt":
        return (range(ends[-1]),)
    runs: dict[int, range] = {}
    for span, start, stop in zip(row, ends[:-1], ends[1:], strict=True):
        if span.media >= 0:
            runs[span.media] = range(runs[span.media].start if span.media in runs else start, stop)
    return tuple(runs.values())


def reaching(sees: Sees, kinds: Int[Tensor, "b s"], positions: Int[Tensor, "b s"]) -> tuple[Int[Tensor, "b s"], ...]:
    """The last position that each token sees, -1 for padding; none at all where that is its own.

    `kinds` is -1 for padding, 0 for words and 1, 2, ... for the visual inputs of a row.
    """
    if sees == "before":
        return ()
    if sees == "prompt":
        return (positions.amax(dim=1, keepdim=True).expand_as(positions).masked_fill(positions < 0, -1),)
    # a row has no more visual inputs than tokens
    kind = kinds.clamp_min(0)
    ends = positions.new_full((len(positions), positions.shape[1] + 1), -1).scatter_reduce_(1, kind, positions, "amax")
    return (torch.where(kinds > 0, ends.gather(1, kind), positions),)
