"""Root mean square layer normalisation (Zhang and Sennrich, arXiv 1910.07467), with the residual sum before it in the same pass.

    t = x + r                                     only where there is a residual; rounded to the dtype, as later layers read it
    y = t / sqrt(mean(t ** 2) + eps) * (w + offset)

Gemma's checkpoints store w - 1: there the offset is 1. Everything is float32 inside and rounded once.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant, normal

__all__ = ["OP", "WIDEST", "add_rms_norm", "rms_norm"]

# A program holds its row in registers.
WIDEST = 32768


def rms_norm(x: Float[Tensor, "*n d"], weight: Float[Tensor, " d"], eps: float, offset: float = 0.0) -> Float[Tensor, "*n d"]:
    """Normalise over the last axis. Raises InputError for rows wider than 32,768 on a GPU."""
    return _computed(x, None, weight, eps, offset)[0]


def add_rms_norm(
    x: Float[Tensor, "*n d"], residual: Float[Tensor, "*n d"], weight: Float[Tensor, " d"], eps: float, offset: float = 0.0
) -> tuple[Float[Tensor, "*n d"], Float[Tensor, "*n d"]]:
    """The normalised sum and the sum itself. Raises InputError as `rms_norm` does."""
    normed, total = _computed(x, residual, weight, eps, offset)
    return normed, total


def _computed(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float) -> Result:
    arguments = x, residual, weight, eps, offset
    return _plan(*arguments).run() if launchable(x) else _reference(*arguments)


def _reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float) -> Result:
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)
    out = normed.to(x.dtype)
    return (out,) if residual is None else (out, total)


def _plan(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float) -> Plan:
    d = x.shape[-1]
    if d > WIDEST:
        raise InputError(f"rows of {d} numbers are wider than the kernel's {WIDEST}", item="x")
    rows = x.reshape(-1, d)
    added = rows if residual is None else residual.reshape(-1, d)
    rows, added = (part if part.stride(-1) == 1 else part.contiguous() for part in (rows, added))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    block = power(d)
    arguments: dict[str, Tensor | int | float] = {
        "x": rows,
        "residual": added,
        "weight": weight.contiguous(),
        "out": out,
        "total": total,
        "x_row": rows.stride(0),
        "residual_row": added.stride(0),
        "d": d,
        "eps": eps,
        "offset": offset,
    }
    constants = {"add": residual is not None, "block": block}
    launch = Launch(_kernel, (len(rows),), arguments, constants, warps=min(max(block // 512, 1), 16))
    return Plan((out,) if residual is None else (out, total), (launch,))


@jit
def _kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    x_row: tl.tensor,
    residual_row: tl.tensor,
    d: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    add: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < d
    value = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if add:
        value += tl.load(residual + row * residual_row + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * d + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / d + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(out + row * d + column, (value * scale * gain).to(out.dtype.element_ty), mask=inside)


def _case(name: str, shape: tuple[int, ...], residual: bool, offset: float = 0.0, spread: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        d = shape[-1]
        # every other row of a larger tensor: rows need not follow each other
        x = normal(generator, dtype, *shape[:-1], 2 * d)[..., :d] if spread else normal(generator, dtype, *shape)
        added = normal(generator, dtype, *shape) if residual else None
        return x, added, normal(generator, dtype, d), 1e-6, offset

    return Case(name, make)


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: rows that 32-bit offsets cannot reach."""
    return distant(normal(generator, dtype, 2, 7)), None, normal(generator, dtype, 7), 1e-6, 0.0


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("one number", (1, 1), False),
        _case("7 x 63", (7, 63), False),
        _case("residual, rows apart", (2, 3, 72), True, spread=True),
        _case("Gemma's offset", (5, 96), True, offset=1.0),
        _case("no rows", (0, 8), True),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(_case("residual, width 4096", (64, 4096), True), _case("width 576", (64, 576), False)),
)
