"""A module's weights in one stretch of memory that the system maps in large pages (Linux's transparent huge pages).

    room = Room.of(size)                   # weights may be read straight into it: room.take(shape, dtype)
    settle(decoder, room)                  # what is not there moves; once the weights are what they are to stay

A step of decoding reads every weight once. In pages of 4 kB, which is what a matrix by itself gets, the processor then looks up tens of
thousands of addresses a step; in pages of 2 MB a hundred.
"""

import ctypes
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain

import torch
from torch import Tensor, nn

__all__ = ["LEAST", "Room", "settle"]

# Of smaller tensors nothing is gained.
LEAST = 1 << 14
_PAGE, _LINE = 1 << 21, 64


class Room:
    """Memory in large pages where the system has them, else in its usual ones. It is given back when the last tensor in it dies."""

    def __init__(self, size: int) -> None:
        """For tensors of so many bytes in all, each of which begins at a multiple of 64."""
        self._pages = _mapped(size + 2 * _PAGE)
        if sys.platform == "linux":
            # An error where the kernel was built without.
            with suppress(OSError):
                self._pages.madvise(mmap.MADV_HUGEPAGE)
        self._start = torch.frombuffer(self._pages, dtype=torch.uint8, count=1).data_ptr()
        self._next = -self._start % _PAGE

    @staticmethod
    def needed(shape: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes that a tensor takes of it."""
        return -(-torch.Size(shape).numel() * dtype.itemsize // _LINE) * _LINE

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor that holds anything, with a storage of its own."""
        size, offset = torch.Size(shape), self._next
        if not size.numel():
            return torch.empty(size, dtype=dtype)
        self._next += self.needed(shape, dtype)
        return torch.frombuffer(self._pages, dtype=torch.uint8, count=size.numel() * dtype.itemsize, offset=offset).view(dtype).view(size)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in it."""
        return self._start <= tensor.data_ptr() < self._start + self._next


def settle(module: nn.Module, room: Room | None = None) -> None:
    """Move what it has in the processor's memory to large pages, but for what lies in this room already.

    Its tensors stay the objects that they are, and tied ones stay tied. Each is moved by itself, so that no more than one is there twice.
    """
    tensors = [tensor for tensor in chain(module.parameters(), module.buffers()) if _movable(tensor)]
    tensors = [tensor for tensor in tensors if room is None or not room.holds(tensor)]
    if not tensors or sys.platform != "linux":
        return
    space = Room(sum(Room.needed(tensor.shape, tensor.dtype) for tensor in tensors))
    moved: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
    for tensor in tensors:
        # By where it was: two of them may stand on the same numbers, which have to be there until both have moved.
        key = tensor.data_ptr(), tensor.shape, tensor.dtype
        if key not in moved:
            moved[key] = space.take(tensor.shape, tensor.dtype).copy_(tensor.detach())
        tensor.data = moved[key]
    # What they left lies between other things, where the C library keeps it for later unless it is asked.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _movable(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.nbytes >= LEAST and tensor.is_contiguous() and not tensor.is_inference()


def _mapped(size: int) -> mmap.mmap:
    # Windows has no such flags, and nothing that they say.
    return mmap.mmap(-1, size) if sys.platform == "win32" else mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
