"""Where the pages of one layer lie: on the fast tier beside the model, in the host's memory, or on disk.

Each tier holds so many pages and never more; what has not been used for the longest time goes one down, pinned pages stay. A page never
changes, so where it lies changes nothing but the time it takes.
"""

from collections import OrderedDict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from mmsdk.diffusion.world.disk import Pair, read_page, write_page
from mmsdk.errors import InputError

__all__ = ["Tiers", "reading_ahead", "side_by_side"]


class Tiers:
    """Pages by number. `reader` reads ahead; files in `folder` begin with `name`."""

    def __init__(self, fast: int, host: int, folder: Path, name: str, reader: ThreadPoolExecutor) -> None:
        if fast < 1 or host < 1:
            raise InputError(f"{fast} pages on the fast tier and {host} in the host's memory; each holds at least one", item="tiers")
        self._most, self._most_host = fast, host
        self._folder, self._name, self._reader = folder, name, reader
        # Both in the order of use, the latest last.
        self._fast: OrderedDict[int, Pair] = OrderedDict()
        self._host: OrderedDict[int, Pair | Future[Pair]] = OrderedDict()
        self._written: set[int] = set()

    @property
    def resident(self) -> tuple[int, int, int]:
        """Pages on the fast tier, in the host's memory, and written to disk."""
        return len(self._fast), len(self._host), len(self._written)

    def add(self, number: int, pair: Pair, pinned: AbstractSet[int]) -> None:
        """A new page, on the fast tier. Raises InputError where pinned pages fill that."""
        self._make_room(1, pinned - {number})
        self._fast[number] = pair

    def take(self, numbers: Sequence[int], pinned: AbstractSet[int]) -> list[Pair]:
        """Pages, brought to the fast tier. Raises InputError where they and the pinned ones do not fit."""
        absent = [number for number in numbers if number not in self._fast]
        for number in numbers:
            if number in self._fast:
                self._fast.move_to_end(number)
        for number in absent:
            # one after the other: what comes up leaves its place in the host's memory to what goes down
            pair = self._fetched(number)
            self._make_room(1, pinned | set(numbers))
            self._fast[number] = pair
        return [self._fast[number] for number in numbers]

    def prefetch(self, numbers: Sequence[int], most: int) -> None:
        """Begin to read the first `most` that lie on disk alone into the host's memory, if that holds them; does not wait."""
        wanted = [number for number in numbers if number not in self._fast and number not in self._host and number in self._written]
        for number in wanted[: min(most, self._most_host)]:
            self._make_room_in_host()
            self._host[number] = self._reader.submit(read_page, self._path(number))

    def _fetched(self, number: int) -> Pair:
        held = self._host.pop(number, None)
        if held is None:
            held = read_page(self._path(number))
        keys, values = held.result() if isinstance(held, Future) else held
        device = next(iter(self._fast.values()))[0].device if self._fast else keys.device
        return keys.to(device, non_blocking=True), values.to(device, non_blocking=True)

    def _make_room(self, count: int, kept: AbstractSet[int]) -> None:
        while len(self._fast) + count > self._most:
            number = next((number for number in self._fast if number not in kept), None)
            if number is None:
                raise InputError(f"{len(kept)} pages are needed at one time; the fast tier holds {self._most}", item="tiers")
            self._to_host(number, self._fast.pop(number))

    def _to_host(self, number: int, pair: Pair) -> None:
        self._make_room_in_host()
        on_gpu = pair[0].device.type == "cuda"
        self._host[number] = (pair[0].cpu().pin_memory(), pair[1].cpu().pin_memory()) if on_gpu else pair

    def _make_room_in_host(self) -> None:
        while len(self._host) >= self._most_host:
            number, held = self._host.popitem(last=False)
            if isinstance(held, Future):
                # it is on disk, and was not waited for
                held.cancel()
            elif number not in self._written:
                write_page(self._path(number), held)
                self._written.add(number)

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._name}-{number}.page"


def reading_ahead() -> ThreadPoolExecutor:
    """One thread, which reads pages while the model runs."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="pages")


def side_by_side(pairs: Sequence[Pair], own: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Pages and new tokens in one piece."""
    keys, values = zip(*pairs, own, strict=True)
    return torch.cat(keys, 2), torch.cat(values, 2)
