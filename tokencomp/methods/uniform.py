"""Uniform: tokens spaced evenly in reading order. The second floor of every table, and hard to beat at high budgets.

Published as the baseline of such tables: of n tokens m stay, those at floor((i + 1/2) n / m), whatever the grid.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.plan import check, keep
from mmsdk.tokencomp.types import Compressed, Side
from mmsdk.vision.types import VisualTokens

__all__ = ["Uniform"]


@dataclass(frozen=True, slots=True)
class Uniform:
    """Keeps `budget` tokens, each in the middle of its part of the sequence; no knobs."""

    side: ClassVar[Side] = "either"
    asks: ClassVar[bool] = False

    def __call__(
        self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget], query: Sequence[Float[Tensor, "_ d"]] | None = None
    ) -> list[Compressed]:
        check(tokens, budgets)
        return [_thin(item, budget.count) for item, budget in zip(tokens, budgets, strict=True)]


def _thin(item: VisualTokens, count: int) -> Compressed:
    started = time.perf_counter()
    # in whole numbers, halves and all: (2 i + 1) n / 2 m
    index = (torch.arange(count, device=item.features.device) * 2 + 1) * len(item) // (2 * count)
    return keep(item, index, method="uniform", seconds=time.perf_counter() - started)
