"""What stands in the layout of a window of frames before, between and behind what is seen, and how it goes into the decoder of a stream."""

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

import torch

from mmsdk.decoder.prefill import Laid
from mmsdk.prompt import Ids, Layout, Slot
from mmsdk.prompt import Span as Part
from mmsdk.stages import Row

__all__ = ["alike", "flat", "ids", "joined", "parted", "sight", "within"]


def ids(spans: Sequence[Part]) -> frozenset[int]:
    """The ids of words, each once."""
    return frozenset(number for span in spans if isinstance(span, Ids) for number in span.ids)


def flat(spans: Sequence[Part]) -> tuple[int, ...]:
    """The ids of words, in order."""
    return tuple(number for span in spans if isinstance(span, Ids) for number in span.ids)


def alike(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """What all of them begin with."""
    same = [len(set(column)) == 1 for column in zip(*rows, strict=False)]
    return rows[0][: (*same, False).index(False)]


def within(layout: Layout) -> tuple[Part, ...]:
    """What stands between the parts of the first visual input."""
    places = [place for place, span in enumerate(layout.spans) if isinstance(span, Slot) and span.media == 0]
    return layout.spans[places[0] : places[-1]]


def parted(layout: Layout) -> tuple[tuple[Part, ...], tuple[Part, ...], tuple[Part, ...]]:
    """What a layout of one or two visual inputs has before the first, between them and behind the last."""
    slots = [(place, span.media) for place, span in enumerate(layout.spans) if isinstance(span, Slot)]
    first = [place for place, media in slots if media == 0]
    second = [place for place, media in slots if media == 1] or [len(layout.spans)]
    between = layout.spans[first[-1] + 1 : second[0]] if layout.media > 1 else ()
    return layout.spans[: first[0]], between, layout.spans[slots[-1][0] + 1 :]


def sight(row: Row, number: int) -> Laid:
    """What stands in a row from its first visual token to its last, with a number by which windows side by side are told apart.

    On several axes places are counted from where its grid begins: in front of it and behind it are words, each of which takes one.
    """
    ends = list(accumulate((span.counts[0] for span in row.spans), initial=0))
    runs = [place for place, span in enumerate(row.spans) if span.media >= 0]
    here, parts = slice(ends[runs[0]], ends[runs[-1] + 1]), row.spans[runs[0] : runs[-1] + 1]
    spans = tuple(dataclasses.replace(span, media=number if span.media >= 0 else -1) for span in parts)
    turns, rest = tuple(axes[:, here] - here.start for axes in row.turns), len(row.embeddings) - here.stop + here.start
    following = tuple(place - rest for place in row.following)
    return Laid(row.embeddings[here], row.positions[here], spans, tuple(added[here] for added in row.deep), turns, following)


def joined(words: Laid, sight: Laid) -> Laid:
    """Words and, behind them, what is seen; nothing deep is added to words."""
    together = torch.cat((words.embeddings, sight.embeddings))
    deep = tuple(torch.cat((torch.zeros_like(words.embeddings), added)) for added in sight.deep)
    count, pairs = len(words.embeddings), zip(words.turns, sight.turns, strict=True)
    turns, following = (
        tuple(torch.cat((axes, behind + count), 1) for axes, behind in pairs),
        tuple(place + count for place in sight.following),
    )
    return Laid(together, torch.arange(len(together)), (*words.spans, *sight.spans), deep, turns, following)
