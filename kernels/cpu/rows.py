"""What a prompt's pass does between its matrix products, in one sweep each, for many rows of bfloat16.

torch reads and writes a whole tensor for every factor and every half; each of these reads its input once. They round once, and are for
tensors without gradients on the processor. All of it needs `library().functions`: ask `here` first.
"""

import ctypes

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.kernels.cpu.library import library

__all__ = ["gated", "here", "normalised", "turned"]


def here(x: Tensor) -> bool:
    """Whether these functions are for this tensor: bfloat16 on the processor, nothing that wants a gradient, and a library."""
    fits = x.dtype == torch.bfloat16 and x.device.type == "cpu" and not torch.is_grad_enabled()
    return fits and library().functions is not None


def _functions() -> ctypes.CDLL:
    functions = library().functions
    assert functions is not None, "asked whether it is here"
    return functions


def normalised(x: Float[Tensor, "*m w"], weight: Float[Tensor, " w"], eps: float) -> Float[Tensor, "*m w"]:
    """x / rms(x) * weight."""
    x, weight = x.contiguous(), weight.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    _functions().norm_rows(x.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), x.numel() // width, width)
    return out


def gated(gate_up: Float[Tensor, "*m i"], gelu: bool) -> Float[Tensor, "*m h"]:
    """act(gate) * up, gate in front, h = i / 2; `gelu` is its tanh form, and SiLU else."""
    gate_up, inner = gate_up.contiguous(), gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], inner)
    _functions().gate_rows(gate_up.data_ptr(), out.data_ptr(), out.numel() // inner, inner, gelu)
    return out


def turned(
    heads: Float[Tensor, "b s n d"], count: int, cos: Float[Tensor, "b s f"], sin: Float[Tensor, "b s f"]
) -> Float[Tensor, "b h s d"]:
    """The first `count` heads of every token, turned: channel i with i + d/2, d = 2 f."""
    (b, s, n, d), f = heads.shape, cos.shape[-1]
    heads, cos, sin = heads.contiguous(), cos.contiguous(), sin.contiguous()
    out = heads.new_empty(b, count, s, d)
    _functions().turn_rows(heads.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), b, s, n, count, f)
    return out
