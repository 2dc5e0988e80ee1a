"""One observation as the decoder left it: keys before their rotation, values, and which slots hold something.

A block [visual slots of camera 0, 1, ... ; instruction slots] is encoded once, at a VLM update [published: D2-VLA, arXiv 2609.34792]. Its
keys are stored before RoPE, so that a reader may place them anywhere.

Letters: l layers, b rows, g key-value heads, s slots of a block, k slots read of it, d head width.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.errors import InputError

__all__ = ["Block", "Layout", "Part", "whole"]


@dataclass(frozen=True, slots=True)
class Layout:
    """What stands where in every block: as many slots as each camera has, camera by camera, then `words` slots of the instruction.

    Published: 3 cameras of 256 and 200 words, 968 slots. Raises InputError where a camera has no slot.
    """

    cameras: tuple[int, ...] = (256, 256, 256)
    words: int = 200

    def __post_init__(self) -> None:
        if not self.cameras or min(self.cameras) < 1 or self.words < 0:
            raise InputError(f"cameras of {self.cameras} slots and {self.words} words; each camera has at least 1", item="layout")

    @property
    def visual(self) -> int:
        """Slots of all cameras."""
        return sum(self.cameras)

    @property
    def slots(self) -> int:
        """All slots."""
        return self.visual + self.words

    def shown(self, present: Bool[Tensor, "b c"]) -> Bool[Tensor, "b n"]:
        """Which visual slots are seen where these cameras are present."""
        sizes = torch.tensor(self.cameras, device=present.device)
        return present.repeat_interleave(sizes, dim=1, output_size=self.visual)


@dataclass(frozen=True, slots=True)
class Block:
    """Keys (before RoPE) and values of every layer, and which slots are valid. `time` is when it was observed, in the memory's unit."""

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
        return self._of(self.block.keys[layer])

    def values(self, layer: int) -> Float[Tensor, "b g k d"]:
        """The values of a layer."""
        return self._of(self.block.values[layer])

    def _of(self, stored: Float[Tensor, "b g s d"]) -> Float[Tensor, "b g k d"]:
        if self.complete:
            return stored
        return stored.gather(2, self.index[:, None, :, None].expand(-1, stored.shape[1], -1, stored.shape[3]))


def whole(block: Block) -> Part:
    """The complete block, as the newest is always read."""
    return Part(block, torch.arange(block.valid.shape[1], device=block.valid.device).expand_as(block.valid), complete=True)
