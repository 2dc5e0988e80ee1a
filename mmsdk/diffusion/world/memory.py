"""The memory of a world: every frame that was, in pages, of which a bounded number lies beside the model.

A reconstruction of WorldAttention's hierarchical cache (abstract). Pages are whole frames. A chunk of new frames reads itself, the first
pages, the latest ones, and those of the others whose index promises most; what is read depends on the index alone, never on where it lies.
The sums of linear attention know all frames.
"""

import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from mmsdk.diffusion.types import Attend, Spot
from mmsdk.diffusion.world.hybrid import Hybrid, Sums, summed
from mmsdk.diffusion.world.index import Index, Kind
from mmsdk.diffusion.world.room import Room, moved_in
from mmsdk.diffusion.world.tiers import Tiers, reading_ahead, side_by_side
from mmsdk.errors import InputError

__all__ = ["Paging", "WorldMemory"]


@dataclass(frozen=True, slots=True)
class Paging:
    """Frames of a page; pages that are always read (`sinks` first, `recent` last) and `recalled` others; pages that tiers hold, a layer."""

    frames: int = 1
    sinks: int = 1
    recent: int = 2
    recalled: int = 4
    fast: int = 16
    host: int = 64
    index: Kind = "bounds"

    def __post_init__(self) -> None:
        if min(self.frames, self.fast, self.host) < 1 or min(self.sinks, self.recent, self.recalled) < 0:
            raise InputError(f"{self}: a page has a frame, a tier a page, and counts are not below 0", item="paging")
        needed = self.sinks + self.recent + self.recalled
        if self.fast < needed + 1:
            raise InputError(f"{needed} pages are read at one time and one is new; the fast tier holds {self.fast}", item="paging")


class WorldMemory:
    """Of one rollout; its passes of the guidance share nothing. Its pages lie in a folder of its own inside `folder`.

    As a context manager it ends: the thread that reads ahead, and the pages. It ends, too, when nobody holds it any more, and when the
    program does.
    """

    def __init__(self, folder: Path, paging: Paging = Paging(), hybrid: Hybrid = Hybrid()) -> None:
        room = moved_in(folder)
        self._folder, self._paging, self._hybrid = room.folder, paging, hybrid
        self._layers: dict[tuple[str, int], _Layer] = {}
        self._reader = reading_ahead()
        self._end = weakref.finalize(self, _ended, self._reader, room)

    def __enter__(self) -> "WorldMemory":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def resident(self) -> tuple[tuple[int, int, int], ...]:
        """Of each layer and pass: pages on the fast tier, in the host's memory, on disk."""
        # a copy: another thread may be adding layers
        return tuple(layer.tiers.resident for layer in list(self._layers.values()))

    def at(self, step: int, steps: int, branch: str) -> Attend:
        """See `mmsdk.diffusion.attending.Attending`: new frames read the memory and leave it as it is."""
        return _Reading(self, branch, writing=False)

    def writing(self, branch: str) -> Attend:
        """New frames read the memory, and become part of it."""
        return _Reading(self, branch, writing=True)

    def prefetch(self) -> None:
        """Begin to read from disk what has weighed most lately."""
        for layer in self._layers.values():
            layer.tiers.prefetch(layer.index.likely(), self._paging.recalled)

    def layer(self, branch: str, spot: Spot) -> "_Layer":
        """The pages of a pass and layer. Raises InputError where the memory has ended."""
        if not self._end.alive:
            raise InputError("it has ended, and its pages are gone; begin another one", item="memory")
        key = (branch, spot.layer)
        if key not in self._layers:
            self._layers[key] = _Layer(self._paging, self._hybrid, self._folder, f"{branch}-{spot.layer}", self._reader)
        return self._layers[key]


def _ended(reader: ThreadPoolExecutor, room: Room) -> None:
    reader.shutdown(cancel_futures=True)
    room.leave()


@dataclass(frozen=True, slots=True)
class _Reading:
    memory: WorldMemory
    branch: str
    writing: bool

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b h s d"], values: Float[Tensor, "b h s d"], spot: Spot
    ) -> Float[Tensor, "b h s d"]:
        layer = self.memory.layer(self.branch, spot)
        out = layer.read(query, keys, values)
        if self.writing:
            layer.write(keys, values, spot.grid.frame)
        return out


class _Layer:
    """The pages of one layer and pass."""

    def __init__(self, paging: Paging, hybrid: Hybrid, folder: Path, name: str, reader: ThreadPoolExecutor) -> None:
        self._paging, self._hybrid = paging, hybrid
        self.index = Index(paging.index)
        self.tiers = Tiers(paging.fast, paging.host, folder, name, reader)
        self._sums: tuple[Sums, ...] = ()

    def read(self, query: Tensor, keys: Tensor, values: Tensor) -> Float[Tensor, "b h s d"]:
        """New tokens over themselves and the pages that matter."""
        everything = summed(keys, values)
        for sums in self._sums:
            everything = sums + everything
        count, pinned = len(self.index), self._pinned()
        low, high = min(self._paging.sinks, count), max(self._paging.sinks, count - self._paging.recent)
        best = self.index.best(query, low, min(high, count), self._paging.recalled, self._hybrid.block)
        pages = self.tiers.take(sorted(pinned | set(best)), pinned)
        return self._hybrid(query, *side_by_side(pages, (keys, values)), everything)

    def write(self, keys: Tensor, values: Tensor, frame: int) -> None:
        """New pages. Raises InputError where the frames are no whole pages."""
        size = frame * self._paging.frames
        if keys.shape[2] % size:
            raise InputError(f"{keys.shape[2] // frame} frames are no whole pages of {self._paging.frames}", item="chunk")
        for start in range(0, keys.shape[2], size):
            # copies: a view would hold the whole chunk in memory wherever the page goes
            page = tuple(x[:, :, start : start + size].clone() for x in (keys, values))
            self.index.add(page[0])
            self.tiers.add(len(self.index) - 1, (page[0], page[1]), self._pinned())
        new = summed(keys, values)
        self._sums = (self._sums[0] + new if self._sums else new,)

    def _pinned(self) -> frozenset[int]:
        count = len(self.index)
        return frozenset(range(min(self._paging.sinks, count))) | frozenset(range(max(0, count - self._paging.recent), count))
