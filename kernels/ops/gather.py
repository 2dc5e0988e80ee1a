"""Token gather: the tokens that a compressor or a cache policy keeps, in one pass.

    y[b, m] = x[b, index[b, m]];   0 where the index is not a token of its row

An index outside 0 .. n - 1 (by habit -1) marks a place that stays empty, so that rows may keep unequal numbers. Nothing is read there.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kernels._triton import jit, launchable, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant, normal

__all__ = ["OP", "gather"]

_BLOCK = 1024


def gather(x: Float[Tensor, "b n d"], index: Int[Tensor, "b m"]) -> Float[Tensor, "b m d"]:
    """Whole tokens by their index, per row."""
    return (_plan(x, index).run() if launchable(x) else _reference(x, index))[0]


def _reference(x: Tensor, index: Tensor) -> Result:
    inside = (index >= 0) & (index < x.shape[1])
    if x.shape[1] == 0:
        return (x.new_zeros(*index.shape, x.shape[2]),)
    rows = torch.arange(len(x), device=x.device)[:, None]
    return (x[rows, index.where(inside, 0).long()].masked_fill_(~inside[..., None], 0),)


def _plan(x: Tensor, index: Tensor) -> Plan:
    x = x if x.stride(-1) == 1 else x.contiguous()
    index = index.contiguous()
    b, m = index.shape
    n, d = x.shape[1:]
    out = torch.empty(b, m, d, dtype=x.dtype, device=x.device)
    arguments: dict[str, Tensor | int | float] = {
        "x": x,
        "index": index,
        "out": out,
        "x_row": x.stride(0),
        "x_token": x.stride(1),
        "m": m,
        "n": n,
        "d": d,
    }
    return Plan((out,), (Launch(_kernel, (b * m, -(-d // _BLOCK)), arguments, {"block": _BLOCK}),))


@jit
def _kernel(
    x: tl.tensor,
    index: tl.tensor,
    out: tl.tensor,
    x_row: tl.tensor,
    x_token: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    d: tl.tensor,
    block: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < d
    token = tl.load(index + place).to(tl.int64)
    readable = tl.where((token >= 0) & (token < n), d, 0)
    value = tl.load(x + place // m * x_row + token * x_token + column, mask=column < readable, other=0.0)
    tl.store(out + place * d + column, value, mask=inside)


def _case(name: str, b: int, n: int, m: int, d: int) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        index = torch.randint(-1, n, (b, m), generator=generator)
        return normal(generator, dtype, b, n, d), index

    return Case(name, make)


def _beyond(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """Indices that are no tokens, in int32."""
    return normal(generator, dtype, 2, 3, 5), torch.tensor([[0, 3, -1, 2], [1, -7, 2**31 - 1, 1]], dtype=torch.int32)


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: tokens that 32-bit offsets cannot reach."""
    return distant(normal(generator, dtype, 2, 7))[None], torch.tensor([[1, 0, 1]])


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("one number", 1, 1, 1, 1),
        _case("7 of 63", 2, 63, 7, 72),
        _case("two blocks", 1, 3, 2, 1030),
        _case("none kept", 2, 5, 0, 8),
        Case("no token has that index", _beyond),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(_case("width 3584", 2, 1024, 256, 3584),),
)
