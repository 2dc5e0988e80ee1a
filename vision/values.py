"""Values as they are handed over: which are numbers (also those of NumPy, a Fraction, a tensor of one), and how messages show them."""

import math
from typing import SupportsFloat, TypeGuard, cast

import numpy as np
from torch import Tensor

__all__ = ["real", "shown", "whole"]

LONGEST = 60


def real(value: object) -> float:
    """The number that a value is; NaN for what is none, or too large for a float."""
    if isinstance(value, np.ndarray | np.generic | Tensor):
        plain = value.ndim == 0 and (isinstance(value, Tensor) or value.dtype.kind in "biuf")
    else:
        plain = isinstance(value, SupportsFloat)
    try:
        return float(cast(SupportsFloat, value)) if plain else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def whole(value: object, least: int) -> TypeGuard[int]:
    """Whether a value is a whole number, Python's or NumPy's, of at least `least`; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= least


def shown(value: object) -> str:
    """A value as messages show it, in at most 60 letters."""
    try:
        text = repr(value)
    except ValueError:
        # Python writes out no whole number of more than some thousand digits
        return f"<{type(value).__name__} too long to show>"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
