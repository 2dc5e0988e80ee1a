"""The activations of vision transformers that torch has no function for."""

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["gelu_tanh", "quick_gelu", "swiglu"]


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU (arXiv 1606.08415) by the hyperbolic tangent, as SigLIP has it."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """GELU by the logistic function, as CLIP has it."""
    return x * torch.sigmoid(1.702 * x)


def swiglu(x: Tensor) -> Tensor:
    """The second half of the last axis under the gate of the first (arXiv 2002.05202)."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value
