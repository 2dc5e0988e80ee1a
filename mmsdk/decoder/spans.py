"""What stands where in a batch of prompts while tokens are dropped: runs of words and of visual inputs, by the host's own arithmetic.

A clip may stand in several runs, with words between its steps. How many tokens of it are left is known ahead, of which steps is not: after
a cut its runs hold some tokens or other, as many as all together should, and `Arrangement.holding` tells what stands where.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["Arrangement", "Span", "arranged", "between", "gathered", "places"]


@dataclass(frozen=True, slots=True)
class Span:
    """A run of tokens: of a visual input, by its number in the prompt, or of words (-1).

    `counts` are its tokens at first and after each cut; words keep theirs.
    """

    media: int
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The batch at one stage. `kinds` is -1 for padding, 0 for words and 1, 2, ... for the visual inputs of a row.

    `stay` is how many tokens there are of each kind, from padding on (which counts as none); `text` are the places of the words, padded in
    front by -1; `lengths` the tokens of each row, `width` the most of them.
    """

    kinds: Int[Tensor, "b s"]
    stay: Int[Tensor, "b c"]
    text: Int[Tensor, "b r"]
    lengths: tuple[tuple[int, ...], ...]
    width: int

    def holding(self, kinds: Int[Tensor, "b s"]) -> "Arrangement":
        """The same with what really stands where, after a cut."""
        columns = torch.arange(self.width, device=kinds.device).expand_as(kinds).masked_fill(kinds != 0, -1).sort(dim=1).values
        return replace(self, kinds=kinds, text=columns[:, self.width - self.text.shape[1] :])


def between(row: Sequence[Span], start: int, stop: int) -> tuple[Span, ...]:
    """The spans of some tokens of a row before any cut."""
    ends = list(accumulate((span.counts[0] for span in row), initial=0))
    parts = [(span.media, min(stop, end) - max(start, begin)) for span, begin, end in zip(row, ends[:-1], ends[1:], strict=True)]
    return tuple(Span(media, (count,)) for media, count in parts if count > 0)


def arranged(rows: Sequence[Sequence[Span]], stage: int, device: torch.device) -> Arrangement:
    """Where everything stands after `stage` cuts, each row padded in front to the longest."""
    lengths = tuple(tuple(span.counts[stage] for span in row) for row in rows)
    width = max(map(sum, lengths))
    kinds = torch.full((len(rows), width), -1)
    stay = torch.zeros(len(rows), 3 + max(span.media for row in rows for span in row), dtype=torch.int64)
    for place, (row, counts) in enumerate(zip(rows, lengths, strict=True)):
        numbers, repeats = torch.tensor([span.media + 1 for span in row]), torch.tensor(counts)
        kinds[place, width - sum(counts) :] = numbers.repeat_interleave(repeats)
        stay[place].index_add_(0, numbers + 1, repeats)
    columns = torch.arange(width).expand_as(kinds).masked_fill(kinds != 0, -1).sort(dim=1).values
    text = columns[:, width - int(stay[:, 1].max()) :]
    return Arrangement(kinds.to(device), stay.to(device), text.to(device), lengths, width)


def places(row: Sequence[Span], width: int) -> dict[int, Int[Tensor, " n"]]:
    """The columns of each visual input of a row before any cut, in a batch `width` tokens wide."""
    counts = [span.counts[0] for span in row]
    ends = list(accumulate(counts, initial=width - sum(counts)))
    runs: dict[int, list[Tensor]] = defaultdict(list)
    for span, start, end in zip(row, ends[:-1], ends[1:], strict=True):
        runs[span.media].append(torch.arange(start, end))
    return {media: torch.cat(parts) for media, parts in runs.items() if media >= 0}


def gathered(x: Float[Tensor, "b s d"], index: Int[Tensor, "b k"]) -> Float[Tensor, "b k d"]:
    """The tokens at these places; padding (-1) becomes any of them, which its position of -1 keeps out of sight."""
    return x.gather(1, index.clamp_min(0)[..., None].expand(-1, -1, x.shape[2]))
