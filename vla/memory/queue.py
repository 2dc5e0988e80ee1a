"""The blocks that are remembered, oldest first, each with the scores that its readers gave it; what is evicted takes its scores along.

Published (D2-VLA, arXiv 2609.34792): two queues, slow of 4 blocks and fast of 2, the current one included, so that before an insert one
block less is kept. Three consumers with scores of their own: the VLM's prefill and the expert's slow denoising read the slow queue, its
fast denoising the fast one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vla.memory.block import Block, Layout, Part, whole
from mmsdk.vla.memory.scores import smoothed
from mmsdk.vla.memory.selection import Selection

__all__ = ["BlockQueue", "Consumer", "Remembered"]

Consumer = Literal["prefill", "slow", "fast"]


@dataclass(frozen=True, slots=True)
class Remembered:
    """A block and each consumer's scores h of it, [l b s]; a consumer that has never read it is not among them: its scores are 0."""

    block: Block
    scores: Mapping[Consumer, Tensor] = field(default_factory=lambda: MappingProxyType({}))

    def score(self, consumer: Consumer) -> Float[Tensor, "l b s"]:
        """h of a consumer."""
        if consumer in self.scores:
            return self.scores[consumer]
        layers = len(self.block.keys)
        return torch.zeros(layers, *self.block.valid.shape, device=self.block.valid.device)

    def part(self, consumer: Consumer, selection: Selection, layout: Layout) -> Part:
        """What a consumer reads of it now."""
        if selection.budget(layout) == layout.visual:
            return whole(self.block)
        return Part(self.block, selection.index(self.score(consumer).amax(0), self.block.valid, layout), complete=False)

    def observed(self, consumer: Consumer, part: Part, received: Float[Tensor, "l b k"], keep: float) -> "Remembered":
        """The same block after a read."""
        after = smoothed(self.score(consumer), part.index, part.valid, received, keep)
        return replace(self, scores=MappingProxyType({**self.scores, consumer: after}))


class BlockQueue:
    """First in, first out; at most `capacity` blocks, the current one included. Raises InputError for less than 1."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise InputError(f"it is {capacity}; the current block alone needs 1", item="capacity")
        self.capacity = capacity
        self.entries: tuple[Remembered, ...] = ()

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values held."""
        return sum(entry.block.nbytes for entry in self.entries)

    def make_room(self) -> None:
        """Evict until one more block fits."""
        self.entries = self.entries[max(0, len(self.entries) - self.capacity + 1) :]

    def push(self, block: Block) -> None:
        """Remember a block, evicting the oldest where there is no room."""
        self.make_room()
        self.entries = (*self.entries, Remembered(block))

    def parts(self, consumer: Consumer, selection: Selection, layout: Layout) -> tuple[Part, ...]:
        """What a consumer reads of the blocks that are held now."""
        return tuple(entry.part(consumer, selection, layout) for entry in self.entries)

    def observe(self, consumer: Consumer, parts: Sequence[Part], received: Float[Tensor, "l b t"], keep: float) -> None:
        """Take note of what a consumer looked at while it read these parts, side by side; blocks evicted since are passed over."""
        widths = [part.index.shape[1] for part in parts]
        seen = {id(part.block): (part, share) for part, share in zip(parts, received.split(widths, dim=2), strict=True)}
        self.entries = tuple(
            entry.observed(consumer, *seen[id(entry.block)], keep) if id(entry.block) in seen else entry for entry in self.entries
        )

    def clear(self) -> None:
        """Forget everything, scores included."""
        self.entries = ()
