"""Chains of choices in C++ (choosing.cpp) for inputs on the processor: unlike seeds, the greedy determinant, twins that are dropped.

They choose what the torch loops of `mmsdk.kernels.ops` choose, by the same rule for what is equal (`mmsdk.kernels.choice`), without torch's
calls between one choice and the next. All of it needs `library().functions`: ask `here` first.
"""

import ctypes

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels.choice import TIE
from mmsdk.kernels.cpu.library import library
from mmsdk.kernels.pairs import ENTRIES

__all__ = ["farthest", "greedy", "here", "untwinned"]

# Bytes of vectors that a core reads again and again out of its own cache; all pairs at once pay where a third of their rows are wanted
# of such, and a sixteenth of larger ones.
_CACHED = 2**20


def here(x: Tensor) -> bool:
    """Whether these functions are for this tensor: tokens on the processor, and a library."""
    return x.device.type == "cpu" and x.numel() > 0 and library().functions is not None


def farthest(z: Float[Tensor, "b n d"], first: Int[Tensor, " b"], count: int) -> Int[Tensor, "b m"]:
    """As `mmsdk.kernels.ops.farthest_point`, of 1 <= count <= n. Raises InputError where `first` names no token."""
    n = z.shape[1]
    if len(first) != len(z) or not bool(((first >= 0) & (first < n)).all()):
        raise InputError(f"{first.tolist()} names no first one of {n} tokens for each of {len(z)} inputs", item="first")
    some = _together(z, count)
    chosen = [_farthest(part, start, count) for part, start in zip(z.split(some), first.split(some), strict=True)]
    return torch.cat(chosen) if len(chosen) > 1 else chosen[0]


def greedy(y: Float[Tensor, "b n d"], count: int) -> Int[Tensor, "b m"]:
    """As `mmsdk.kernels.ops.dpp_greedy`, of 1 <= count <= n."""
    chosen = [_greedy(part, count) for part in y.split(_together(y, count))]
    return torch.cat(chosen) if len(chosen) > 1 else chosen[0]


def untwinned(pairs: Float[Tensor, "b n n"], count: int, step: int) -> Int[Tensor, "b m"]:
    """As `mmsdk.kernels.ops.drop_twins`, of 1 <= count <= n and step >= 1."""
    pairs = pairs.detach().float().contiguous()
    (b, n, _), out = pairs.shape, torch.empty(len(pairs), count, dtype=torch.int64)
    if not _functions().drop_twins(pairs.data_ptr(), b, n, count, step, TIE, out.data_ptr()):
        raise MemoryError(f"no memory to choose {count} of {n} tokens")
    return out


def _farthest(z: Tensor, first: Tensor, count: int) -> Tensor:
    z, first = z.detach().float().contiguous(), first.long().contiguous()
    (b, n, d), source, out = z.shape, _source(z, count), first.new_empty(len(z), count)
    whole = source is not z
    if not _functions().choose_farthest(source.data_ptr(), first.data_ptr(), b, n, d, whole, count, TIE, out.data_ptr()):
        raise MemoryError(f"no memory to choose {count} of {n} tokens")
    return out


def _greedy(y: Tensor, count: int) -> Tensor:
    y = y.detach().float().contiguous()
    (b, n, d), source = y.shape, _source(y, count)
    loss, out = y.square().sum(dim=2).neg_(), torch.empty(b, count, dtype=torch.int64)
    whole = source is not y
    if not _functions().choose_greedily(source.data_ptr(), loss.data_ptr(), b, n, d, whole, count, TIE, out.data_ptr()):
        raise MemoryError(f"no memory to choose {count} of {n} tokens")
    return out


def _source(z: Tensor, count: int) -> Tensor:
    """All pairs, or the vectors themselves: whichever is read faster, of what may be held."""
    return z @ z.transpose(1, 2) if _at_once(z, count) else z


def _at_once(z: Tensor, count: int) -> bool:
    n, d = z.shape[1:]
    return n * n <= ENTRIES and (3 if 4 * n * d <= _CACHED else 16) * count >= n


def _together(z: Tensor, count: int) -> int:
    """Inputs at one time: all, or as many as whose pairs may be held together."""
    return max(ENTRIES // z.shape[1] ** 2, 1) if _at_once(z, count) else len(z)


def _functions() -> ctypes.CDLL:
    functions = library().functions
    assert functions is not None, "asked whether it is here"
    return functions
