"""Whether Triton's kernels compute what stands between a decoder's matrix products: the one place where that is decided.

Norms, the rotation, SwiGLU and draws go to `mmsdk.kernels.ops` where Triton runs. Each of these kernels computes in float32 and rounds
once, where torch rounds between its steps; in float32 both are the same to the last digits.
"""

import torch
from torch import Tensor, nn

from mmsdk.kernels._triton import launchable

__all__ = ["launches", "unheard"]

_KINDS = (torch.float32, torch.float16, torch.bfloat16)


def launches(*inputs: Tensor) -> bool:
    """Where Triton runs, for numbers that kernels read, if nobody wants a gradient: kernels have none."""
    if not launchable(inputs[0]):
        return False
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    return not learns and all(x.dtype in _KINDS for x in inputs)


def unheard(module: nn.Module) -> bool:
    """Whether nobody listens to a module, so that it may be computed together with its neighbours and not called."""
    return not module._forward_hooks and not module._forward_pre_hooks
