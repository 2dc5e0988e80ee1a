"""Values as they are handed over: which are numbers (also those of NumPy, a Fraction, a tensor of one), and how messages show them."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import SupportsFloat, TypeGuard, cast

import numpy as np
from torch import Tensor, nn

__all__ = ["brief", "cause", "real", "shown", "whole"]

LONGEST = 60
FEW = 4  # parts of a sequence that are shown


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


def cause(error: BaseException) -> str:
    """What went wrong, without the name of the file: whoever tells of it has said that already."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def brief(value: object) -> str:
    """A dataclass with types and shapes in the place of numbers and pixels: what `repr` gives of one that holds some."""
    assert is_dataclass(value), "only of these are the parts known"
    return f"{type(value).__name__}({', '.join(f'{one.name}={_part(getattr(value, one.name))}' for one in fields(value) if one.repr)})"


def _part(value: object) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, list | tuple):
        told = [*map(_part, value[:FEW]), *([f"... {len(value)} in all"] if len(value) > FEW else [])]
        return f"[{', '.join(told)}]" if isinstance(value, list) else f"({', '.join(told)}{',' * (len(value) == 1)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{shown(key)}: {_part(one)}' for key, one in list(value.items())[:FEW])}{', ...' * (len(value) > FEW)}}}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    return brief(value) if is_dataclass(value) and not isinstance(value, type) else shown(value)
