"""The gated half of a SwiGLU feed-forward (Shazeer, arXiv 2002.05202), between its two matrix products.

    y = silu(g) * u,   silu(g) = g / (1 + exp(-g)),   [g | u] = x [W_gate | W_up]

One matrix gives g and u side by side, gate first; the kernel reads them where they are. float32 inside, rounded once.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mmsdk.kernels._triton import jit, launchable, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant, normal

__all__ = ["OP", "swiglu"]

_BLOCK = 1024


def swiglu(gate_up: Float[Tensor, "*n d2"]) -> Float[Tensor, "*n d"]:
    """silu of the first half of the last axis times its second half."""
    return (_plan(gate_up).run() if launchable(gate_up) else _reference(gate_up))[0]


def _reference(gate_up: Tensor) -> Result:
    gate, up = gate_up.float().chunk(2, -1)
    return ((F.silu(gate) * up).to(gate_up.dtype),)


def _plan(gate_up: Tensor) -> Plan:
    d = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * d)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = torch.empty(*gate_up.shape[:-1], d, dtype=gate_up.dtype, device=gate_up.device)
    grid = len(rows), -(-d // _BLOCK)
    return Plan((out,), (Launch(_kernel, grid, {"x": rows, "out": out, "x_row": rows.stride(0), "d": d}, {"block": _BLOCK}),))


@jit
def _kernel(x: tl.tensor, out: tl.tensor, x_row: tl.tensor, d: tl.tensor, block: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < d
    gate = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + d + column, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * d + column, value.to(out.dtype.element_ty), mask=inside)


def _case(name: str, *shape: int) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        return (normal(generator, dtype, *shape),)

    return Case(name, make)


def _large(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """Gates whose exponential overflows float32."""
    return (torch.tensor([[-100.0, 100.0, 0.0, -88.0, 1.0, -1.0, 2.0, 0.5]]).to(dtype),)


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: rows that 32-bit offsets cannot reach."""
    return (distant(normal(generator, dtype, 2, 14)),)


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("one number", 1, 2),
        _case("7 x 63", 7, 126),
        _case("two blocks", 2, 2, 2100),
        Case("large", _large),
        _case("none", 0, 8),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(_case("width 14336", 64, 28672),),
)
