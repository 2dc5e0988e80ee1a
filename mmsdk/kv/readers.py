"""Blocks that are remembered for several readers: each selects for itself, by what it has been looking at (online attention scores).

    queue = BlockQueue(4)
    parts = queue.parts("answer", Selection(ratio=0.7), layout)          # what this reader takes of the blocks that are held
    cache = UnturnedCache.behind(parts, decoder.rotation)                # and reads, at positions without gaps (`mmsdk.kv.unturned`)
    queue.observe("answer", parts, received, keep=0.2)                   # it looked at this much of each entry
    queue.push(cache.block(slots))                                       # the oldest block goes, its scores with it

Published (D2-VLA, arXiv 2609.34792, there called Online-H2O): first in, first out, the current block included, so that before an insert
one less is kept; h+ = rho h + (1 - rho) abar for the entries that were observed this time, rho = .2; the others keep what they have, and
new ones begin at 0; an entry's score u is the largest h over the layers, taken before the read; scores go with their block. Readers never
share scores. `mmsdk.kv.policies.h2o` sums attention for good and evicts by it; here nothing is evicted that a reader does not look at,
since another one may.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kv.parts import Block, Part, whole
from mmsdk.kv.selection import BlockLayout, Selection

__all__ = ["BlockQueue", "Remembered", "smoothed"]


@dataclass(frozen=True, slots=True)
class Remembered:
    """A block and each reader's scores h of it, [l b s]; a reader that has never read it is not among them: its scores are 0."""

    block: Block
    scores: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))

    def score(self, reader: str) -> Float[Tensor, "l b s"]:
        """h of a reader."""
        if reader in self.scores:
            return self.scores[reader]
        layers = len(self.block.keys)
        return torch.zeros(layers, *self.block.valid.shape, device=self.block.valid.device)

    def observed(self, reader: str, part: Part, received: Float[Tensor, "l b k"], keep: float) -> "Remembered":
        """The same block after a read."""
        after = smoothed(self.score(reader), part.index, part.valid, received, keep)
        return replace(self, scores=MappingProxyType({**self.scores, reader: after}))


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

    def parts(self, reader: str, selection: Selection, layout: BlockLayout) -> tuple[Part, ...]:
        """What a reader takes of the blocks that are held now."""
        if selection.budget(layout) == layout.visual or not self.entries:
            return tuple(whole(entry.block) for entry in self.entries)
        # all blocks are chosen from at one time, one below the other, as rows that do not know of each other
        worth = torch.cat([entry.score(reader).amax(0) for entry in self.entries])
        index = selection.index(worth, torch.cat([entry.block.valid for entry in self.entries]), layout).chunk(len(self.entries))
        return tuple(Part(entry.block, mine, complete=False) for entry, mine in zip(self.entries, index, strict=True))

    def observe(self, reader: str, parts: Sequence[Part], received: Float[Tensor, "l b t"], keep: float) -> None:
        """Take note of what a reader looked at while it read these parts, side by side; blocks evicted since are passed over.

        `keep` is rho.
        """
        widths = [part.index.shape[1] for part in parts]
        seen = {id(part.block): (part, share) for part, share in zip(parts, received.split(widths, dim=2), strict=True)}
        self.entries = tuple(
            entry.observed(reader, *seen[id(entry.block)], keep) if id(entry.block) in seen else entry for entry in self.entries
        )

    def clear(self) -> None:
        """Forget everything, scores included."""
        self.entries = ()


def smoothed(
    scores: Float[Tensor, "l b s"],
    index: Int[Tensor, "b k"],
    valid: Bool[Tensor, "b k"],
    received: Float[Tensor, "l b k"],
    keep: float,
) -> Float[Tensor, "l b s"]:
    """The scores after a read of these slots, `keep` being rho; slots that were not read, or hold nothing, stay as they are."""
    places = index.expand(len(scores), -1, -1)
    before = scores.gather(2, places)
    after = torch.where(valid, keep * before + (1 - keep) * received.to(scores.dtype), before)
    return scores.scatter(2, places, after)
