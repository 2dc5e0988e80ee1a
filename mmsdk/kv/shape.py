"""What a decoder's keys and values are like."""

from dataclasses import dataclass

import torch

from mmsdk.kv.three_level import Plan

__all__ = ["Shape"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a decoder's keys and values are like; `head_dim` is the width of both, or one for each.

    One that remembers in levels has a plan of them.
    """

    layers: int
    kv_heads: int
    head_dim: int | tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    levels: tuple[Plan, ...] = ()
