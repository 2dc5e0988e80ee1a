"""Whether Triton's kernels attend to what an attention is given."""

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.kernels._triton import launchable

__all__ = ["launches"]

# What the kernels take: channels of a head, and dtypes.
_WIDEST, _KINDS = 256, (torch.float32, torch.float16, torch.bfloat16)


def launches(query: Float[Tensor, "b h s d"], keys: Float[Tensor, "*n d"], values: Float[Tensor, "*m e"]) -> bool:
    """Where Triton runs, for tensors of one dtype and heads of at most 256 channels, if nobody wants a gradient: kernels have none."""
    inputs = query, keys, values
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    alike = len({x.dtype for x in inputs}) == 1 and query.dtype in _KINDS
    return launchable(query) and alike and not learns and max(x.shape[-1] for x in inputs) <= _WIDEST
