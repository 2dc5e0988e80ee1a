"""What a decoder's keys and values are like."""

from dataclasses import dataclass

import torch

__all__ = ["Shape"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a decoder's keys and values are like; `head_dim` is the width of both, or one for each."""

    layers: int
    kv_heads: int
    head_dim: int | tuple[int, int]
    dtype: torch.dtype
    device: torch.device
