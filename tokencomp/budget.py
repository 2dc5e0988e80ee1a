"""How many visual tokens may stay: a count, resolved once from what the user wrote."""

import math
from dataclasses import dataclass
from numbers import Integral
from typing import SupportsFloat

import numpy as np

from mmsdk.errors import BudgetError
from mmsdk.tokencomp.share import nearest
from mmsdk.vision.values import shown

__all__ = ["Budget"]


@dataclass(frozen=True, slots=True)
class Budget:
    """A token count, at least 1."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise BudgetError(f"a budget must keep at least one token, got {self.count}")

    @staticmethod
    def of(amount: SupportsFloat, n: int) -> "Budget":
        """Resolve `amount` against n tokens: a whole number, numpy's too, is a count in [1, n], a float in (0, 1] a fraction
        (rounded half up, at least 1).

        Raises BudgetError for zero, negative, NaN, a fraction above 1 or a count above n.
        """
        if isinstance(amount, bool | np.bool_) or not isinstance(amount, SupportsFloat):
            raise BudgetError(f"a budget is a count or a fraction, got {shown(amount)}")
        if isinstance(amount, Integral):
            # a count of numpy's is no int, and would be read as a share
            amount = int(amount)
            if amount < 1:
                raise BudgetError(f"a budget must keep at least one token, got {amount}")
            if not 1 <= amount <= n:
                raise BudgetError(
                    f"budget {amount} tokens is outside [1, {n}]: the input has {n} visual tokens; a share such as 0.25 fits every input"
                )
            return Budget(amount)
        # a narrow float of numpy's as it is written, not as its bits say
        amount = float(str(amount)) if isinstance(amount, np.floating) else float(amount)
        if not math.isfinite(amount) or not 0 < amount <= 1:
            raise BudgetError(f"budget fraction {amount} is outside (0, 1]; write a whole number for a token count")
        return Budget(max(1, nearest(amount, n)))
