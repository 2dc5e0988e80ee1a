"""The columns that all rows of `mmsdk bench video` have, and what is told of an output beside the dense one."""

import math
import time
from collections.abc import Callable

from torch import Tensor

from mmsdk.apps.console import Cell

__all__ = ["Row", "psnr", "rel_l2", "row", "seconds"]

Row = dict[str, Cell]

# A row of every kind has all of these; what a kind does not measure is None.
_COLUMNS = ("kind", "method", "sparsity", "tokens", "speedup", "seconds", "rel_l2", "psnr", "agreement", "l2_hit", "l2_hit_unordered")


def row(kind: str, method: str, tokens: int, sparsity: float | None = None) -> Row:
    """One with nothing measured yet."""
    made: Row = dict.fromkeys(_COLUMNS)
    return made | {"kind": kind, "method": method, "sparsity": sparsity, "tokens": tokens}


def rel_l2(out: Tensor, dense: Tensor) -> float:
    """The length of the error over that of the dense output."""
    return float((out.double() - dense.double()).norm() / dense.double().norm())


def psnr(out: Tensor, dense: Tensor, span: float | None = None) -> float | None:
    """Against `span`, or the range of the dense output, in dB; None where they are equal."""
    loss = float((out.double() - dense.double()).square().mean())
    span = float(dense.max() - dense.min()) if span is None else span
    return None if loss == 0 else 10 * math.log10(span**2 / loss)


def seconds(run: Callable[[], object]) -> float:
    """How long it takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
