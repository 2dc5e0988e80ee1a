"""Fake quantisation: what tokens look like after symmetric rounding to b bits and back, without changing their dtype."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["fake_quantise"]


def fake_quantise(x: Float[Tensor, "b n d"], bits: int, scale: Literal["token", "tensor"] = "token") -> Float[Tensor, "b n d"]:
    """s * clamp(round(x / s), -q, q) in float32 with q = 2^(bits-1) - 1 and s = max|x| / q, per token or per input."""
    x, most = x.float(), 2 ** (bits - 1) - 1
    largest = x.abs().amax(dim=2 if scale == "token" else (1, 2), keepdim=True)
    # what is zero throughout stays zero on any step
    step = torch.where(largest > 0, largest / most, 1.0)
    return step * (x / step).round().clamp(-most, most)
