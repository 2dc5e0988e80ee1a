"""Block-sparse attention in C++ (blocks.cpp), for inputs on the processor: what a mask leaves out is neither read nor computed.

    out = attend(query, keys, values, mask, row_starts, key_starts, scale)

All of it needs `library().functions`: ask `here` first.
"""

import ctypes

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.kernels.cpu.library import library

__all__ = ["attend", "here"]


class _Blocked(ctypes.Structure):
    """`Blocked` of blocks.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "mask", "row_starts", "key_starts")),
        *((name, ctypes.c_long) for name in ("b", "h", "g", "s", "t", "d", "rows", "columns", "half")),
        ("scale", ctypes.c_float),
    ]


def here(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether this is for these tensors, on the processor, of which no gradient is wanted: float32, or bfloat16 of even channels.

    With AMX torch's products of bfloat16 are faster than these.
    """
    given = (query, keys, values)
    if not all(x.device.type == "cpu" and x.dtype == query.dtype and x.numel() > 0 for x in given):
        return False
    half = query.dtype == torch.bfloat16 and query.shape[3] % 2 == 0 and not torch.cpu.get_capabilities().get("amx_bf16", False)
    learned = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    return (half or query.dtype == torch.float32) and not learned and library().functions is not None


def attend(
    query: Float[Tensor, "b h s d"],
    keys: Float[Tensor, "b g t d"],
    values: Float[Tensor, "b g t d"],
    mask: Bool[Tensor, "b h rows columns"],
    row_starts: Int[Tensor, "#b #h rows1"],
    key_starts: Int[Tensor, "#b #g columns1"],
    scale: float,
) -> Float[Tensor, "b h s d"]:
    """softmax(scale q k^T) v over the columns of keys that the row of a query reads; 0 where it reads nothing.

    Row r holds the queries from row_starts[r] to row_starts[r + 1], column c the keys from key_starts[c] on; starts rise from 0 to the
    length, and are not checked beyond their ends. h / g query heads share a key-value head, in order.
    """
    (b, h, s, d), (g, t) = query.shape, keys.shape[1:3]
    rows, columns = (starts.shape[2] - 1 for starts in (row_starts, key_starts))
    assert mask.shape == (b, h, rows, columns) and h % g == 0, "a mask of these rows and columns"
    ours = [x.detach().contiguous() for x in (query, keys, values)]
    names = mask.contiguous().view(torch.uint8)
    spans = [starts.long().expand(b, heads, -1).contiguous() for starts, heads in ((row_starts, h), (key_starts, g))]
    out = torch.empty(b, h, s, d, dtype=query.dtype)
    addresses = [x.data_ptr() for x in (*ours, names, *spans)]
    functions = library().functions
    assert functions is not None, "asked whether it is here"
    told = _Blocked(*addresses, b, h, g, s, t, d, rows, columns, query.dtype == torch.bfloat16, scale)
    functions.attend_blocks(ctypes.byref(told), out.data_ptr())
    return out
