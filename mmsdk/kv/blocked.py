"""Entries as blocks of one size, for policies that choose which blocks a query reads.

The blocks of a row begin with its first token, wherever that stands, so that padding in front changes nothing; the last one need not be
full. What a policy wants to know of every block (a sum, a bound) is folded token by token, as they come.

Letters: b rows, g key-value heads, s new tokens, t entries, n blocks, k blocks chosen, d width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kernels.ops.block_gather import block_gather
from mmsdk.kv.entries import Entries

__all__ = ["Blocked", "blocked", "folded", "least_of", "most_of"]

Fold = Literal["sum", "amin", "amax"]

# Blocks to spare behind those in use when a fold needs more memory.
_SPARE = 16


@dataclass(frozen=True, slots=True)
class Blocked:
    """Where the blocks of each row begin, and how many tokens each of the n has, of a row with fewer blocks 0 behind them."""

    entries: Entries
    size: int
    starts: Int[Tensor, " b"]
    sizes: Int[Tensor, "b n"]

    @property
    def count(self) -> int:
        """Blocks of the longest row, or one more where every row has padding."""
        return self.sizes.shape[1]

    @property
    def last(self) -> Int[Tensor, "b 1"]:
        """The newest block of each row, which may not be full."""
        return ((self.sizes > 0).sum(1, keepdim=True) - 1).clamp_min(0)

    def read(self, query: Float[Tensor, "b h 1 d"], index: Int[Tensor, "b g k"], bias: Float[Tensor, "b g k"]) -> Float[Tensor, "b h 1 d"]:
        """What a query gets from the listed blocks, whose scores are moved by a bias."""
        entries, scale = self.entries, query.shape[3] ** -0.5
        asked = query[:, :, 0], entries.keys, entries.values, index, bias, entries.valid[:, 0], self.starts, self.size, scale
        return block_gather(*asked)[0][:, :, None]


def blocked(entries: Entries, size: int) -> Blocked:
    """Blocks of so many tokens. All heads hold the same."""
    starts = _noted(entries, "starts", lambda: entries.valid[:, 0].long().argmax(1))
    begin = torch.arange(0, entries.count, size, device=starts.device)
    return Blocked(entries, size, starts, (entries.count - starts[:, None] - begin).clamp(0, size))


def folded(blocks: Blocked, fold: Fold, start: float) -> Float[Tensor, "b g n d"]:
    """The sum, the least or the largest of the keys of each block, channel by channel, in float32; `start` where there are none.

    Kept with the entries, and brought up to date with those that have come since.
    """
    entries = blocks.entries
    room, seen = _noted(entries, fold, lambda: entries.keys[:, :, :0].float()), entries.memo.get(f"{fold} of", 0)
    assert isinstance(seen, int), "a number is noted under this name"
    if room.shape[2] < blocks.count:
        fresh = room.new_full((*room.shape[:2], blocks.count + _SPARE, room.shape[3]), start)
        fresh[:, :, : room.shape[2]] = room
        room = fresh
        entries.memo[fold] = room
    if seen < entries.count:
        columns = torch.arange(seen, entries.count, device=room.device)
        home = ((columns - blocks.starts[:, None]) // blocks.size).clamp_min(0)
        new = entries.keys[:, :, seen:].float().masked_fill(~entries.valid[:, :, seen:, None], start)
        room.scatter_reduce_(2, home[:, None, :, None].expand_as(new), new, fold, include_self=True)
        entries.memo[f"{fold} of"] = entries.count
    return room[:, :, : blocks.count]


def least_of(entries: Entries, keep: Int[Tensor, " b"]) -> int:
    """The smallest of the budgets, asked likewise."""
    return int(_noted(entries, "least", lambda: keep.min().cpu()))


def most_of(entries: Entries, keep: Int[Tensor, " b"]) -> int:
    """The largest of the budgets, which do not change: the device is asked once."""
    return int(_noted(entries, "most", lambda: keep.max().cpu()))


def _noted(entries: Entries, name: str, make: Callable[[], Tensor]) -> Tensor:
    held = entries.memo.get(name)
    if isinstance(held, Tensor):
        return held
    made = make()
    entries.memo[name] = made
    return made
