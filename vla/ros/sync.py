"""Messages of several streams put together by their stamps, which are never quite equal: one of each, all within `slop` of one another.

The sets are those of message_filters' ApproximateTimeSynchronizer (Python), found in polynomial instead of exponential time.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from math import isfinite
from typing import Generic, TypeVar

from mmsdk.errors import InputError
from mmsdk.vla.ros.stamps import SECOND

__all__ = ["Synchronizer"]

T = TypeVar("T")


class Synchronizer(Generic[T]):
    """Takes messages one by one, in any order, and hands out a set as soon as one is complete; no message is in two sets.

    `overflowed` counts messages that left a full queue unused: a stream that is much faster than the others, or a slop that is too small.
    """

    def __init__(self, streams: Sequence[str], slop: float, depth: int = 10) -> None:
        """`slop` in seconds; of each stream the `depth` newest messages wait. Raises InputError for no streams, one twice, and no slop."""
        if not streams or len(set(streams)) != len(streams):
            raise InputError(f"expected streams, each once; got {', '.join(streams) or 'none'}", item="synchronizer")
        if not (isfinite(slop * SECOND) and round(slop * SECOND) > 0) or depth < 1:
            raise InputError(f"slop {slop} is a number of seconds above 0, depth {depth} at least 1", item="synchronizer")
        self.slop, self.depth, self.overflowed = round(slop * SECOND), depth, 0
        self._queues: dict[str, dict[int, T]] = {stream: {} for stream in streams}

    def take(self, stream: str, stamp: int, value: T) -> dict[str, T] | None:
        """Take a message, measured at `stamp` (nanoseconds); the set that it completes, or None while there is none.

        Of several sets it is the one whose members are nearest to this message, stream by stream in the order they were declared. Raises
        InputError for an unknown stream, and a message that is not stamped: it belongs nowhere.
        """
        if stream not in self._queues:
            raise InputError(f"there is no stream {stream!r}; there is {', '.join(self._queues)}", item="synchronizer")
        if stamp <= 0:
            raise InputError("a message that is not stamped cannot be put together with others", item=stream)
        queue = self._queues[stream]
        queue[stamp] = value
        while len(queue) > self.depth:
            del queue[min(queue)]
            self.overflowed += 1
        return self._matched(stream, stamp) if stamp in queue else None

    def clear(self) -> None:
        """Forget everything that waits: the clock has gone back, or a new episode begins."""
        for queue in self._queues.values():
            queue.clear()

    def _matched(self, stream: str, stamp: int) -> dict[str, T] | None:
        others = [name for name in self._queues if name != stream]
        near = [sorted((s for s in self._queues[name] if abs(s - stamp) <= self.slop), key=lambda s: abs(s - stamp)) for name in others]
        chosen = [stamp]
        for place in range(len(others)):
            fitting = (s for s in near[place] if _completes([*chosen, s], near[place + 1 :], self.slop))
            found = next(fitting, None)
            if found is None:
                return None
            chosen.append(found)
        if not _completes(chosen, [], self.slop):
            return None
        stamps = dict(zip([stream, *others], chosen, strict=True))
        return {name: queue.pop(stamps[name]) for name, queue in self._queues.items()}


def _completes(chosen: Sequence[int], rest: Sequence[Iterable[int]], slop: int) -> bool:
    """Whether one of each of the rest can join those that are chosen so that all lie within less than `slop`."""
    earliest, latest = min(chosen), max(chosen)
    starts = {earliest, *(s for s in chain(*rest) if latest - slop < s <= earliest)}
    return any(latest - start < slop and all(any(0 <= s - start < slop for s in stream) for stream in rest) for start in starts)
