"""Identity: every token stays. What a pipeline runs when nothing is to be compressed, and the baseline of every table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn

from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import BudgetError, PluginError
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.plan import check, untouched
from mmsdk.tokencomp.types import Compressed, Side
from mmsdk.vision.types import VisualTokens

__all__ = ["Identity"]


@dataclass(frozen=True, slots=True)
class Identity:
    """Returns its input. Raises BudgetError for a budget below the full count, since it cannot meet it."""

    side: ClassVar[Side] = "either"
    asks: ClassVar[bool] = False

    def __call__(
        self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget], query: Sequence[Float[Tensor, "_ d"]] | None = None
    ) -> list[Compressed]:
        check(tokens, budgets)
        for i, (item, budget) in enumerate(zip(tokens, budgets, strict=True)):
            if budget.count != len(item):
                raise BudgetError(f"identity keeps all {len(item)} tokens and cannot keep {budget.count}; choose another method", index=i)
        return [untouched(item) for item in tokens]

    def held(self, count: int) -> NoReturn:
        """A stream has no end, and what keeps everything of it has no bound. Raises PluginError."""
        raise PluginError("identity keeps all tokens, and a stream has no end; choose a method that can drop or merge some")
