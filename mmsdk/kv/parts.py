"""What was read once and is read again: blocks of keys before their rotation, of values, and the slots of them that a reader takes.

A block is what one pass through the decoder left. Its keys are kept before RoPE, so that a reader may place them anywhere, and it is never
encoded again: it carries what it read of others (published: D2-VLA, arXiv 2609.34792).

Letters: l layers, b rows, g key-value heads, s slots of a block, k slots read of it, d head width.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.kv.types import taken

__all__ = ["Block", "Part", "whole"]


@dataclass(frozen=True, slots=True)
class Block:
    """Keys (before RoPE) and values of every layer, and which slots are valid. `time` is when it was observed, in its owner's unit."""

    keys: Float[Tensor, "l b g s d"]
    values: Float[Tensor, "l b g s d"]
    valid: Bool[Tensor, "b s"]
    time: float

    @property
    def nbytes(self) -> int:
        """Bytes of its keys and values."""
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True, slots=True)
class Part:
    """What a reader takes of a block: these slots, ascending; the same of every layer, of keys and of values.

    `complete` says that they are all the slots there are: then nothing is copied.
    """

    block: Block
    index: Int[Tensor, "b k"]
    complete: bool

    @property
    def valid(self) -> Bool[Tensor, "b k"]:
        """Which of the slots hold something."""
        return self.block.valid if self.complete else self.block.valid.gather(1, self.index)

    def keys(self, layer: int) -> Float[Tensor, "b g k d"]:
        """The keys of a layer, before RoPE."""
        return self.block.keys[layer] if self.complete else taken(self.block.keys[layer], self.index)

    def values(self, layer: int) -> Float[Tensor, "b g k d"]:
        """The values of a layer."""
        return self.block.values[layer] if self.complete else taken(self.block.values[layer], self.index)


def whole(block: Block) -> Part:
    """The complete block, as the newest is always read."""
    return Part(block, torch.arange(block.valid.shape[1], device=block.valid.device).expand_as(block.valid), complete=True)
