"""A budget said as a time: "auto@prefill<80ms" keeps as many visual tokens as a prefill of 80 ms has room for.

The time is that of one question by itself, whatever shares its batch, so that a batch gives the answers that its rows give alone.
"""

import math
import re
from dataclasses import dataclass

from mmsdk.errors import BudgetError
from mmsdk.vision.values import real, shown

__all__ = ["AUTO", "Target"]

# What an amount begins with that is no number but a target.
AUTO = "auto"

_FORM = re.compile(r"auto@prefill<(?P<number>[0-9.eE+-]+)(?P<unit>ms|s)")
_SHAPE = 'write a target as "auto@prefill<80ms" or "auto@prefill<0.5s"'


@dataclass(frozen=True, slots=True)
class Target:
    """At most `ms` milliseconds of prefill. Raises BudgetError for a time that is no finite number above 0."""

    ms: float

    def __post_init__(self) -> None:
        if isinstance(self.ms, bool) or not 0 < real(self.ms) < math.inf:
            raise BudgetError(f"a prefill of {shown(self.ms)} ms is no target, expected a finite time above 0; {_SHAPE}")

    @staticmethod
    def parse(text: str) -> "Target":
        """Read "auto@prefill<80ms"; milliseconds (ms) or seconds (s). Raises BudgetError that says what was expected."""
        found = _FORM.fullmatch(text.replace(" ", ""))
        if found is None:
            raise BudgetError(f"the amount {text!r} is no target; {_SHAPE}")
        try:
            number = float(found["number"])
        except ValueError:
            raise BudgetError(f"the amount {text!r}: {found['number']!r} is no number; {_SHAPE}") from None
        return Target(number * (1000 if found["unit"] == "s" else 1))
