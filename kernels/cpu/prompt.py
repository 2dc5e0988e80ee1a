"""A decoder layer for the many rows of a prompt, and attention of many queries: by tiles on a processor with AMX, else by vectors.

    qkv = project(layer, x, cos, sin)                    # [m, h + 2 g, d]
    seen = attend(query, keys, values, behind, biases)   # [b, h, s, d], a view of [b, s, h, d]
    x = finish(layer, x, seen)                           # [m, width]
    x, before = read(layers, x, cos, sin, memory, last)  # all of it, layer after layer, storing the new keys and values
    out = product(matrix, x)                             # [m, n]

Everything is bfloat16, summed in float32 and rounded where these functions give it back. Weights are read as they lie for decoding, and are
not copied. All of it needs `ready()`, and rows that `fits`, `takes` or `attends` says it has.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kernels.cpu.layer import Layer
from mmsdk.kernels.cpu.library import library
from mmsdk.kernels.cpu.matrix import Matrix

__all__ = ["Memory", "attend", "attends", "finish", "fits", "product", "project", "read", "reads", "ready", "takes"]

# Columns of a tile; no head has more channels than this.
_STEP, _WIDEST = 32, 256
# Tokens times layers of one call, half a second's worth of a small model.
_AT_ONCE = 2**14


class _Attention(ctypes.Structure):
    """`Attention` of attend_many.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "bias")),
        *((name, ctypes.c_long * 3) for name in ("query", "key", "value", "biased")),
        *((name, ctypes.c_long) for name in ("b", "h", "g", "s", "t", "d", "behind", "tiles")),
        ("scale", ctypes.c_float),
    ]


class _Memory(ctypes.Structure):
    """`Memory` of prompt.cpp."""

    _fields_ = [(name, ctypes.c_long) for name in ("row", "head", "token", "start", "behind")]


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a prompt's pass leaves the keys and values of some layers, a piece of memory each, and finds those of the tokens `behind` it.

    `places` are the first elements of the new tokens, row by row, and `strides` the steps from a row to the next, from a head to the next
    and from a token to the next, in elements, the same for keys and values. Where tokens stand behind the new ones, as many in each row,
    both together lie `strides` apart from element `start` on.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    places: Int[Tensor, " m"]
    strides: tuple[int, int, int]
    behind: int = 0
    start: int = 0


def ready() -> bool:
    """Whether there is the library."""
    return library().functions is not None


def _functions() -> ctypes.CDLL:
    functions = library().functions
    assert functions is not None, "asked whether it is here"
    return functions


def takes(matrix: Matrix) -> bool:
    """Whether `product` is for such a matrix."""
    return bool(matrix.fields.columns % _STEP == 0)


def fits(layer: Layer) -> bool:
    """Whether `project` and `finish` are for such a layer: whole tiles of everything that is summed over."""
    fields = layer.fields
    return not any(size % _STEP for size in (fields.width, fields.heads * fields.head_dim, fields.inner))


def product(matrix: Matrix, x: Float[Tensor, "m k"]) -> Float[Tensor, "m n"]:
    """x times the transposed matrix, plus its bias, rounded once."""
    assert x.dtype == torch.bfloat16 and x.device.type == "cpu", "bfloat16 rows"
    x = x.contiguous()
    out = x.new_empty(len(x), matrix.rows)
    _functions().product_many(ctypes.byref(matrix.fields), x.data_ptr(), out.data_ptr(), len(x))
    return out


def project(layer: Layer, x: Float[Tensor, "m w"], cos: Float[Tensor, "m f"], sin: Float[Tensor, "m f"]) -> Float[Tensor, "m n d"]:
    """Queries, keys and values of the normalised stream, n = h + 2 g heads, the first two turned; f = d / 2."""
    fields = layer.fields
    out = x.new_empty(len(x), fields.heads + 2 * fields.kv_heads, fields.head_dim)
    _functions().project_many(ctypes.byref(fields), x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), len(x))
    return out


def finish(layer: Layer, x: Float[Tensor, "m w"], seen: Float[Tensor, "m n"]) -> Float[Tensor, "m w"]:
    """The stream after the layer, from the stream before it and from what its heads saw, side by side."""
    out = torch.empty_like(x)
    _functions().finish_many(ctypes.byref(layer.fields), x.data_ptr(), seen.data_ptr(), out.data_ptr(), len(x))
    return out


def reads(memory: Memory) -> bool:
    """Whether `read` is for keys and values that lie so."""
    keys, values = memory.keys[0], memory.values[0]
    alike = keys.dtype == values.dtype == torch.bfloat16 and keys.stride() == values.stride() and keys.device.type == "cpu"
    return alike and keys.shape == values.shape and keys.stride(-1) == 1 and keys.shape[-1] <= _WIDEST


def read(
    layers: Sequence[Layer], x: Float[Tensor, "b s w"], cos: Float[Tensor, "m f"], sin: Float[Tensor, "m f"], memory: Memory, last: int = 0
) -> tuple[Float[Tensor, "b _ w"], Float[Tensor, "b s w"]]:
    """The stream after these layers, of the `last` so many tokens of each row (all with 0), and before the last of them; m = b s.

    A token sees those before it in its row, and all layers have the same sizes. `fits` must hold of each, and `reads` of the memory. Few
    layers go in one call of a long prompt, as Python hears of Ctrl-C between calls alone.
    """
    some, before = max(1, _AT_ONCE // (x.shape[0] * x.shape[1])), x
    for start in range(0, len(layers), some):
        ends = slice(start, start + some)
        part = replace(memory, keys=memory.keys[ends], values=memory.values[ends])
        x, before = _read(layers[ends], x, cos, sin, part, last if start + some >= len(layers) else 0)
    return x, before


def _read(layers: Sequence[Layer], x: Tensor, cos: Tensor, sin: Tensor, memory: Memory, last: int) -> tuple[Tensor, Tensor]:
    (b, s, width), count, fields = x.shape, len(layers), layers[0].fields
    last = min(last, s) or s
    heads = fields.heads * fields.head_dim
    work = x.new_empty(b * s * (2 * heads + 2 * fields.kv_heads * fields.head_dim) + b * last * width)
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    before, out = torch.empty_like(x), x.new_empty(b, last, width)
    pointers = (ctypes.c_void_p * count)(*(ctypes.addressof(layer.fields) for layer in layers))
    pieces = [(ctypes.c_void_p * count)(*(part.data_ptr() for part in parts)) for parts in (memory.keys, memory.values)]
    where = *pieces, memory.places.data_ptr(), ctypes.byref(_Memory(*memory.strides, memory.start, memory.behind))
    given, found = (x.data_ptr(), cos.data_ptr(), sin.data_ptr()), (work.data_ptr(), before.data_ptr(), out.data_ptr())
    _functions().read_many(pointers, count, *given, *where, *found, b, s, last)
    return out, before


def attends(query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b g t e"], values: Float[Tensor, "b g t w"]) -> bool:
    """Whether `attend` is for these: several bfloat16 queries without gradients, and entries as wide as they."""
    alike = all(x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.stride(-1) == 1 for x in (query, keys, values))
    sizes = query.shape[2] > 1 and keys.shape[2] > 0 and query.shape[3] == keys.shape[3] == values.shape[3] <= _WIDEST
    return alike and sizes and not torch.is_grad_enabled() and ready()


def attend(
    query: Float[Tensor, "b h s d"],
    keys: Float[Tensor, "b g t d"],
    values: Float[Tensor, "b g t d"],
    behind: int,
    biases: tuple[Float[Tensor, "#b 1 s t"], ...] = (),
    tiles: bool = True,
) -> Float[Tensor, "b h s d"]:
    """softmax(q k^T / sqrt(d) + bias) v over the entries 0 to i + behind of query i; a bias, bfloat16, alone says what is seen.

    Heads share keys and values in order. A query that sees nothing gets 0. Without `tiles` it goes by vectors where there is AMX too.
    `attends` must hold.
    """
    (b, h, s, d), (g, t) = query.shape, keys.shape[1:3]
    out = query.new_empty(b, s, h, d)
    fields = _Attention(query.data_ptr(), keys.data_ptr(), values.data_ptr(), *(bias.data_ptr() for bias in biases[:1] or ()))
    fields.query, fields.key, fields.value = (x.stride()[:3] for x in (query, keys, values))
    for bias in biases[:1]:
        assert bias.dtype == torch.bfloat16 and bias.stride(3) == 1 and bias.shape[2:] == (s, t), "a bfloat16 bias of this size"
        fields.biased = (bias.stride(0) if len(bias) > 1 else 0, 0, bias.stride(2))
    fields.b, fields.h, fields.g, fields.s, fields.t, fields.d, fields.behind = b, h, g, s, t, d, behind
    fields.tiles, fields.scale = tiles, d**-0.5
    _functions().attend_many(ctypes.byref(fields), out.data_ptr())
    return out.transpose(1, 2)
