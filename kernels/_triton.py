"""Triton where there is one, and what the kernels need of it; without it every operation runs its torch reference.

Triton has wheels for Linux. Whether it compiles or interprets is settled when it is first imported: under TRITON_INTERPRET=1 the kernels
run on the processor, in numpy, one program after the other, and whoever would launch them on a GPU does so there. That is slow and exact,
which is what tests want.
"""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

__all__ = ["accumulable", "jit", "launchable", "power", "tl", "triton"]

# The stand-in holds what is read while the kernels' files are imported, and nothing else. In a kernel's signature `tl.tensor` is a pointer
# or a number that changes from launch to launch; Triton reads annotations, and `int` would mean 32 bits to it.
try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = SimpleNamespace(constexpr=object, tensor=object)

_INTERPRETS = triton is not None and triton.knobs.runtime.interpret


def jit(function: Callable[..., object]) -> Any:
    """triton.jit of the function itself: what a hook of the tests wrapped around it has no source to compile."""
    return function if triton is None else triton.jit(inspect.unwrap(function))


def launchable(tensor: Tensor) -> bool:
    """Whether a kernel can run where this tensor is: a GPU (ROCm calls itself cuda too), or a processor where Triton interprets."""
    return triton is not None and (tensor.is_cuda or (_INTERPRETS and tensor.device.type == "cpu"))


def power(number: int) -> int:
    """The least power of two that is not below `number`, at least 1: blocks have such sizes."""
    return 1 << max(number - 1, 0).bit_length()


def accumulable(dtype: torch.dtype) -> Any:
    """The type in which a kernel multiplies matrices of this dtype; sums are float32 always.

    The interpreter keeps bfloat16 as its bits and would multiply those, so there it is float32.
    """
    exact = dtype == torch.float32 or (dtype == torch.bfloat16 and _INTERPRETS)
    return tl.float32 if exact else {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
