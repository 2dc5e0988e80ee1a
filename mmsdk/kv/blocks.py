"""Which blocks of a pool are held, and by how many: what a paged cache takes from, shares and gives back.

A pool is a grid. A block is 16 tokens of one layer; a column is the blocks of the same number in all layers. Layers that hold the same
tokens take the same columns, so that one list of columns says where a row lies in all of them, and layers that hold fewer tokens leave
blocks for others.

A GPU finds each block by a table. A processor's kernels want stretches of memory, so that a row goes on in the neighbour of its last
column as long as that is free, and begins a new stretch in the middle of the widest gap, where it and what lies before it can grow.
"""

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mmsdk.errors import InputError, MmsdkError

__all__ = ["Blocks", "PoolFullError"]


class PoolFullError(MmsdkError):
    """The pool has no free block. Nothing was taken."""


class Blocks:
    """Counts of holders, [layers columns]; 0 is free. Safe between threads.

    Columns that are kept for whoever may want them again are held like any other; of their blocks those that nobody else holds are `idle`.
    What is held and idle is counted as it changes: both are asked for at every token.
    """

    def __init__(self, layers: int, columns: int) -> None:
        for name, size in (("layers", layers), ("columns", columns)):
            if size < 1:
                raise InputError(f"it is {size}, it must be at least 1", item=name)
        self._holders = np.zeros((layers, columns), dtype=np.int32)
        self._kept = np.zeros(columns, dtype=np.bool_)
        self._held = self._idle = 0
        # Caches that die are given back from wherever the collector runs, which may be inside one of the calls below.
        self._lock = threading.RLock()

    @property
    def columns(self) -> int:
        """How many there are in each layer."""
        return self._holders.shape[1]

    @property
    def held(self) -> int:
        """Blocks with a holder, over all layers: 0 when every cache has gone."""
        return self._held

    @property
    def idle(self) -> int:
        """Blocks of kept columns that nobody else holds, over all layers."""
        return self._idle

    def free(self, layers: range) -> int:
        """Columns that are free in all of these layers."""
        return int(self._free(layers).sum())

    def shared(self, layers: range, column: int) -> bool:
        """Whether another holds it too in any of these layers: such a block is never written."""
        return bool((self._holders[layers.start : layers.stop, column] > 1).any())

    def take(self, layers: range, count: int, after: int = -1) -> list[int]:
        """So many free columns, now held once in these layers, in the order of memory where possible, from behind `after` on.

        Raises PoolFullError where there are fewer.
        """
        with self._lock:
            free = self._free(layers)
            if free.sum() < count:
                raise PoolFullError(f"{count} blocks are wanted in layers {layers.start} to {layers.stop - 1}, {int(free.sum())} are free")
            taken = list[int]()
            while len(taken) < count:
                start, stop = _next_stretch(free, count - len(taken), after)
                taken.extend(range(start, stop))
                free[start:stop] = False
                after = stop - 1
            self._change(layers, taken, 1)
        return taken

    def hold(self, layers: range, columns: Sequence[int]) -> None:
        """One more holder of each of these columns, which are different ones."""
        with self._lock:
            self._change(layers, columns, 1)

    def give(self, layers: range, columns: Sequence[int]) -> None:
        """One holder less; with the last one a block is free."""
        with self._lock:
            self._change(layers, columns, -1)

    def keep(self, column: int, kept: bool) -> None:
        """From now on this column, which is held in all layers, is one that is kept, or is none any more."""
        with self._lock:
            alone = int((self._holders[:, column] == 1).sum())
            self._idle += alone * (int(kept) - int(self._kept[column]))
            self._kept[column] = kept

    def _change(self, layers: range, columns: Sequence[int], by: int) -> None:
        """So many holders more of each of these columns."""
        here = slice(layers.start, layers.stop), list(columns)
        before = self._holders[here]
        after = before + by
        assert (after >= 0).all(), "a block is given back once by each that holds it"
        self._holders[here] = after
        self._held += int((after > 0).sum() - (before > 0).sum())
        self._idle += int((((after == 1).astype(np.int8) - (before == 1)) * self._kept[list(columns)]).sum())

    def _free(self, layers: range) -> NDArray[np.bool_]:
        free: NDArray[np.bool_] = (self._holders[layers.start : layers.stop] == 0).all(axis=0)
        return free


def _next_stretch(free: NDArray[np.bool_], count: int, after: int) -> tuple[int, int]:
    """At most `count` free columns side by side: right behind `after` where that is free, else in the middle of the widest gap."""
    edges = np.flatnonzero(np.diff(free, prepend=False, append=False))
    starts, stops = edges[::2], edges[1::2]
    behind = np.flatnonzero(starts <= after + 1)
    if after >= 0 and after + 1 < len(free) and free[after + 1]:
        start, stop = after + 1, int(stops[behind[-1]])
        return start, min(stop, start + count)
    widest = int((stops - starts).argmax())
    start, stop = int(starts[widest]), int(stops[widest])
    if stop - start <= count:
        return start, stop
    # Nobody grows into the pool's beginning, so that nothing has to be left free there.
    start += (stop - start - count) // 2 if start else 0
    return start, start + count
