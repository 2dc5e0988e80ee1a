"""Pair similarity: the cosine of each token to each token of another set, both given as vectors of length 1.

    s[b, i, j] = sum_d x[b, i, d] y[b, j, d]

float32 whatever the vectors are, in full float32 products (no TF32), tile by tile: besides the result nothing is held. A caller that wants
only the largest of each row takes `nearest_centre`, which holds no matrix at all.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import launchable
from mmsdk.kernels.case import Arguments, Case, Op, Plan, Result, distant, normal
from mmsdk.kernels.pairs import paired, solid

__all__ = ["OP", "pair_similarity"]


def pair_similarity(x: Float[Tensor, "b n d"], y: Float[Tensor, "b m d"]) -> Float[Tensor, "b n m"]:
    """Products of all pairs: cosines of unit vectors, 0 for a zero vector. Raises InputError for two kinds of numbers."""
    if x.dtype != y.dtype:
        raise InputError(f"vectors of {x.dtype} meet vectors of {y.dtype}; give both in one type", item="y")
    return (_plan(x, y).run() if launchable(x) else _reference(x, y))[0]


def _reference(x: Tensor, y: Tensor) -> Result:
    return (x.float() @ y.float().transpose(1, 2),)


def _plan(x: Tensor, y: Tensor) -> Plan:
    out, launch = paired(solid(x), solid(y))
    return Plan((out,), (launch,))


def _case(name: str, b: int, n: int, m: int, d: int, dtype: torch.dtype | None = None) -> Case:
    def make(generator: torch.Generator, given: torch.dtype) -> Arguments:
        return normal(generator, dtype or given, b, n, d) / d**0.5, normal(generator, dtype or given, b, m, d)

    return Case(name, make)


def _among(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """A slice of the tokens against all of them, and a zero vector among these."""
    x = normal(generator, dtype, 2, 70, 24) / 24**0.5
    x[:, 3] = 0
    return x[:, 2:7], x


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: tokens that 32-bit offsets cannot reach."""
    x = normal(generator, dtype, 1, 3, 7) / 7**0.5
    return distant(x[0])[None], distant(x.flip(1)[0])[None]


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("one number", 1, 1, 1, 1),
        _case("7 by 63", 2, 7, 63, 72),
        _case("several tiles", 1, 130, 67, 40),
        _case("no tokens", 2, 0, 3, 8),
        Case("a slice among all", _among),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(_case("1024 by 1024, width 1152", 1, 1024, 1024, 1152), _case("the same in float32", 1, 1024, 1024, 1152, torch.float32)),
)
