"""Random: a uniformly random subset. The floor that a method worth its name has to beat at the same count.

The draw depends on the seed and on the number of tokens alone, so that an input keeps the same tokens in any batch.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import PluginError
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.plan import check, keep
from mmsdk.tokencomp.types import Compressed, Side
from mmsdk.vision.types import VisualTokens

__all__ = ["Random"]


@dataclass(frozen=True, slots=True)
class Random:
    """Keeps `budget` tokens drawn without replacement; `seed` chooses the draw. Raises PluginError for one of more than 64 bits."""

    side: ClassVar[Side] = "either"
    asks: ClassVar[bool] = False

    seed: int = 0

    def __post_init__(self) -> None:
        if not -(2**63) <= self.seed < 2**64:
            raise PluginError(f"random takes a seed of 64 bits, got {self.seed}")

    def __call__(
        self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget], query: Sequence[Float[Tensor, "_ d"]] | None = None
    ) -> list[Compressed]:
        check(tokens, budgets)
        return [self._draw(item, budget.count) for item, budget in zip(tokens, budgets, strict=True)]

    def _draw(self, item: VisualTokens, count: int) -> Compressed:
        started = time.perf_counter()
        # drawn on the CPU whatever the device, so that every device keeps the same tokens
        order = torch.randperm(len(item), generator=torch.Generator().manual_seed(self.seed))
        index = order[:count].to(item.features.device)
        return keep(item, index, method="random", seconds=time.perf_counter() - started)
