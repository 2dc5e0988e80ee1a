"""What memory there is, and what several answers to one prompt take of it: told before any of it is taken."""

import os
from pathlib import Path

import torch

from mmsdk.errors import InputError
from mmsdk.kv.memory import DenseMemory, Memory
from mmsdk.kv.shape import Shape

__all__ = ["check_copies", "check_room", "memory_free"]


def memory_free(device: torch.device) -> int:
    """Bytes that may be taken: of a GPU what is free, else what the system says it can give (of all of it, where it does not say)."""
    if device.type == "cuda":
        # torch keeps what was let go, and gives it out again
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    facts = Path("/proc/meminfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.is_file() else []
    told = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return told[0] if told else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in os.sysconf_names else 0


def check_room(needed: int, device: torch.device, what: str, item: str) -> None:
    """Raise InputError where `what` takes more bytes than are free. Where nobody knows how many are, nothing is refused."""
    free = memory_free(device)
    if needed > free > 0:
        told = f"{what} would take about {needed / 2**30:,.1f} GiB of memory, and {free / 2**30:,.1f} GiB are free"
        raise InputError(f"{told}; ask for fewer, or for shorter answers", item=item)


def check_copies(shape: Shape, memory: Memory, rows: int, tokens: int, room: int, copies: int, item: str) -> None:
    """Raise InputError where `copies` answers each to so many rows of at most `tokens` tokens, `room` of them answer, cannot be held.

    In one piece every answer has the whole of its row, and twice while rows change places; in blocks, of which a pool has four times as
    many as a call needs, what is its own. Of other memories the answers alone are counted, as wide as they come.
    """
    if copies < 2:
        return
    own, times = (tokens, 2) if isinstance(memory, DenseMemory) else (room + 2 * memory.page, 4 if memory.page else 1)
    width = 2 * shape.head_dim if isinstance(shape.head_dim, int) else sum(shape.head_dim)
    each = shape.layers * shape.kv_heads * width * shape.dtype.itemsize
    what = f"{copies} answers at one time of up to {room} tokens each"
    check_room(times * rows * copies * own * each, shape.device, what, item)
