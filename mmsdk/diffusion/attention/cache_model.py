"""A model of a GPU's second-level cache under block-sparse attention: what row orders do to it can be seen without a GPU.

Programs are started head after head, or row by row of several heads abreast, in the order of each head's rows, as many as there are places
for; each reads the blocks on its list one after the other, a block of keys with its block of values at each step, and a place that is done
takes the next program. The cache is set-associative and evicts what was not used for the longest time; a block stands for its bytes, and
its number chooses the set. What is in the cache at the beginning of a step is found by all; what is not is fetched once, and whoever else
wants it in the same step finds it. Queries and outputs, which stream through once, are left out, and all programs take the same time for a
block.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int, Int64

__all__ = ["Machine", "Traffic", "traffic"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Multiprocessors, programs of each at one time, bytes of the cache and places of a set; the defaults are an H100's.

    `abreast` heads are started together, a row of each in turn, as kernels do whose grid has its heads innermost, or whose scheduler deals
    out the longest lists of all heads first; 1 is head after head.
    """

    cores: int = 132
    programs: int = 1
    cache: int = 50 * 2**20
    ways: int = 16
    abreast: int = 1

    @property
    def wave(self) -> int:
        """Rows of one head that run at one time, at least one."""
        return max(1, self.cores * self.programs // self.abreast)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Blocks that programs read, those of them found in the cache, and the steps until the last program was done."""

    reads: int
    hits: int
    steps: int

    @property
    def hit_ratio(self) -> float:
        """The share of reads that needs no memory; 0 where nothing is read."""
        return self.hits / max(self.reads, 1)


def traffic(mask: Bool[np.ndarray, "h rows columns"], order: Int[np.ndarray, "h rows"], block_bytes: int, machine: Machine) -> Traffic:
    """Run the heads' rows in their order; `block_bytes` is the size of a block of keys and its values."""
    lists, starts = _queue(mask, order, machine.abreast)
    ways = max(1, min(machine.ways, machine.cache // block_bytes))
    sets = max(1, machine.cache // (block_bytes * ways))
    held, used = (np.full((sets, ways), -1, dtype=np.int64) for _ in range(2))
    at, until = (np.zeros(0, dtype=np.int64) for _ in range(2))
    places, waiting, reads, hits, steps = machine.cores * machine.programs, 0, 0, 0, 0
    while True:
        going = at < until
        more = slice(waiting, waiting + places - int(going.sum()))
        at = np.concatenate((at[going], starts[:-1][more]))
        until = np.concatenate((until[going], starts[1:][more]))
        waiting = min(more.stop, len(starts) - 1)
        if not len(at):
            return Traffic(reads, hits, steps)
        hits += len(at) - _fetched(np.unique(lists[at]), held, used, reads)
        reads += len(at)
        at = at + 1
        steps += 1


def _queue(
    mask: Bool[np.ndarray, "h rows columns"], order: Int[np.ndarray, "h rows"], abreast: int
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " m"]]:
    """The blocks of all programs one after another, numbered over all heads, and where each program's begin; idle ones are left out."""
    h, rows, columns = mask.shape
    placed = np.take_along_axis(mask, order[..., None].astype(np.int64), axis=1)
    head, row = (at.ravel() for at in np.indices((h, rows)))
    turn = np.lexsort((head, row, head // abreast))
    program, column = placed.reshape(-1, columns)[turn].nonzero()
    counts = np.bincount(program, minlength=h * rows)
    starts = np.concatenate(([0], counts[counts > 0].cumsum()))
    return (head[turn][program] * columns + column).astype(np.int64), starts.astype(np.int64)


def _fetched(blocks: Int64[np.ndarray, " n"], held: Int64[np.ndarray, "sets ways"], used: Int64[np.ndarray, "sets ways"], now: int) -> int:
    """Bring the blocks, ascending and each once, into the cache; how many were not there. `now` counts up by at least as many a step."""
    sets = blocks % len(held)
    found = held[sets] == blocks[:, None]
    hit = found.any(1)
    used[sets[hit], found[hit].argmax(1)] = now + np.arange(hit.sum())
    missing, stamps = blocks[~hit], now + hit.sum() + np.arange((~hit).sum())
    count = len(missing)
    while len(missing):
        # one block a set at a time, the lowest numbers first
        chosen, first = np.unique(missing % len(held), return_index=True)
        way = used[chosen].argmin(1)
        held[chosen, way], used[chosen, way] = missing[first], stamps[first]
        missing, stamps = np.delete(missing, first), np.delete(stamps, first)
    return count
