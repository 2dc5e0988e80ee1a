"""Attention from one set of queries to several levels of memory at once, with a sink.

    out = sum_levels sum_j e^{s_j} v_j / (e^{sink} + sum_levels sum_j e^{s_j}),    s = q k^T / sqrt(d)

A level says what its scores are and how its values are mixed; the softmax runs over all levels together, in float32. The sink (one logit a
head, gpt-oss and DeepSeek-V4) stands in the denominator alone, so that a query that sees nothing gives 0 and no NaN. All query heads share
one head of keys, which are the values too.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["Level", "attend", "over_heads"]

# Scores of a slice of queries that may exist at one time (16 MiB in float32), and queries that share a slice of a banded level.
_SCORES = 1 << 22
_QUERIES = 256


@runtime_checkable
class Level(Protocol):
    """Entries that queries may attend to: a window, a compressed past, a selection of it."""

    @property
    def entries(self) -> int:
        """Scores a query."""
        ...

    def numbers(self, heads: int) -> int:
        """Numbers that one query needs at one time: its scores over all heads, and what is laid out for it alone."""
        ...

    def scores(self, query: Float[Tensor, "b h s d"]) -> Float[Tensor, "b h s t"]:
        """Scaled products in float32, -inf where an entry is not seen."""
        ...

    def mix(self, weights: Float[Tensor, "b h s t"]) -> Float[Tensor, "b h s d"]:
        """The sum of the entries under these weights."""
        ...

    def part(self, start: int, stop: int) -> "Level":
        """The level as queries start to stop see it."""
        ...


def attend(query: Float[Tensor, "b h s d"], levels: Sequence[Level], sinks: Float[Tensor, " h"]) -> Float[Tensor, "b h s d"]:
    """Every query over all levels, in slices of queries, so that no more than some megabytes of scores exist at one time."""
    b, h, s, _ = query.shape
    step = max(1, min(_QUERIES, _SCORES // max(1, b * sum(level.numbers(h) for level in levels))))
    outs = [
        _slice(query[:, :, start : start + step], [level.part(start, min(start + step, s)) for level in levels], sinks)
        for start in range(0, s, step)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def over_heads(query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b t d"]) -> Float[Tensor, "b h s t"]:
    """q k^T / sqrt(d) in float32, the query heads below one another, so that the shared keys are not expanded."""
    b, h, s, d = query.shape
    scores = torch.bmm(query.reshape(b, h * s, d) * d**-0.5, keys.transpose(1, 2))
    return scores.view(b, h, s, keys.shape[1]).float()


def _slice(query: Float[Tensor, "b h s d"], levels: Sequence[Level], sinks: Float[Tensor, " h"]) -> Float[Tensor, "b h s d"]:
    b, _, s, _ = query.shape
    sink = sinks.float()[None, :, None, None].expand(b, -1, s, 1)
    weights = torch.cat((*(level.scores(query) for level in levels), sink), dim=-1).softmax(-1).to(query.dtype)
    shares = weights[..., :-1].split([level.entries for level in levels], dim=-1)
    out = torch.zeros_like(query)
    for level, share in zip(levels, shares, strict=True):
        if level.entries:
            out = out + level.mix(share)
    return out
