"""A module's weights in one stretch of memory that the system maps in large pages (Linux's transparent huge pages).

    settle(decoder)     # once its weights are what they are to stay

A step of decoding reads every weight once. In pages of 4 kB, which is what a matrix by itself gets, the processor then looks up tens of
thousands of addresses a step; in pages of 2 MB a hundred.
"""

import mmap
import sys
from itertools import chain

import torch
from torch import Tensor, nn

__all__ = ["LEAST", "settle"]

# Of smaller tensors nothing is gained.
LEAST = 1 << 14
_PAGE, _LINE = 1 << 21, 64


def settle(module: nn.Module) -> None:
    """Move what it has in the processor's memory there; its tensors stay the objects that they are, and tied ones stay tied.

    Each is moved by itself, so that no more than one is there twice. Nothing happens where a system has no such pages.
    """
    tensors = [tensor for tensor in chain(module.parameters(), module.buffers()) if _movable(tensor)]
    pages = _pages(sum(-(-tensor.nbytes // _LINE) * _LINE for tensor in tensors)) if tensors else None
    if pages is None:
        return
    start = -torch.frombuffer(pages, dtype=torch.uint8, count=1).data_ptr() % _PAGE
    moved: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
    for tensor in tensors:
        # By where it was: two of them may stand on the same numbers, which have to be there until both have moved.
        key = tensor.data_ptr(), tensor.shape, tensor.dtype
        if key not in moved:
            place = torch.frombuffer(pages, dtype=torch.uint8, count=tensor.nbytes, offset=start)
            moved[key] = place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            start += -(-tensor.nbytes // _LINE) * _LINE
        tensor.data = moved[key]


def _movable(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.nbytes >= LEAST and tensor.is_contiguous() and not tensor.is_inference()


def _pages(size: int) -> mmap.mmap | None:
    """So much memory, and room to begin it at a large page."""
    if sys.platform != "linux":
        return None
    pages = mmap.mmap(-1, size + 2 * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        pages.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        # The kernel was built without.
        return None
    return pages
