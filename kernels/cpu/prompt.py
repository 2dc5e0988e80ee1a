"""A decoder layer for the many rows of a prompt, and attention of many queries: by tiles on a processor with AMX, else by vectors.

    qkv = project(layer, x, cos, sin)                    # [m, h + 2 g, d]
    seen = attend(query, keys, values, behind, biases)   # [b, h, s, d], a view of [b, s, h, d]
    x = finish(layer, x, seen)                           # [m, width]
    x, before = read(layers, x, cos, sin, memory, last)  # all of it, layer after layer, storing the new keys and values
    told, steps = read_beside(layers, reads, steps)      # the same of several prompts, and of a decode step of others
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

from mmsdk.kernels.cpu.layer import Layer, Step, StepFields, fields_of
from mmsdk.kernels.cpu.library import library
from mmsdk.kernels.cpu.matrix import Matrix

__all__ = [
    "Memory", "Read", "attend", "attends", "finish", "fits", "product", "project", "read", "read_beside", "reads", "ready", "takes",
]  # fmt: skip

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


class _Read(ctypes.Structure):
    """`Read` of prompt.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "cosine", "sine", "keys", "values", "places")),
        ("memory", _Memory),
        *((name, ctypes.c_void_p) for name in ("work", "before", "out")),
        *((name, ctypes.c_long) for name in ("b", "s", "last")),
    ]


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


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """A prompt's pass: the stream of s tokens in each of b rows, how they are turned, m = b s, where they go, and how many are wanted of
    each row (`read`)."""

    x: Float[Tensor, "b s w"]
    cos: Float[Tensor, "m f"]
    sin: Float[Tensor, "m f"]
    memory: Memory
    last: int = 0


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
    ((found,), _) = read_beside(layers, [Read(x, cos, sin, memory, last)])
    return found


Passed = tuple[Float[Tensor, "_ _ w"], Float[Tensor, "_ _ w"]]
Spoken = tuple[Float[Tensor, "m w"], Float[Tensor, "m w"]]


def read_beside(layers: Sequence[Layer], reads: Sequence[Read], steps: Sequence[Step] = ()) -> tuple[list[Passed], list[Spoken]]:
    """What `read` gives of each of several prompts, and what `mmsdk.kernels.cpu.layer.run` does of one step of others, or of none.

    All of them go through a layer before the next, so that its weights come from memory once. Not a bit of what comes out is another.
    """
    assert len(steps) <= 1, "all who speak are rows of one step"
    some = max(1, _AT_ONCE // max(1, sum(one.x.shape[0] * one.x.shape[1] for one in reads)))
    streams, spoken = [(one.x, one.x) for one in reads], [(one.x, one.x) for one in steps]
    for start in range(0, len(layers), some):
        here, end = slice(start, start + some), start + some >= len(layers)
        parts = [
            replace(one, x=x, memory=_among(one.memory, here), last=one.last if end else 0)
            for one, (x, _) in zip(reads, streams, strict=True)
        ]
        asked = [replace(one, x=x, place=one.place.among(here)) for one, (x, _) in zip(steps, spoken, strict=True)]
        streams, spoken = _passed(layers[here], parts, asked)
    return streams, spoken


def _among(memory: Memory, layers: slice) -> Memory:
    return replace(memory, keys=memory.keys[layers], values=memory.values[layers])


def _passed(layers: Sequence[Layer], reads: Sequence[Read], steps: Sequence[Step]) -> tuple[list[Passed], list[Spoken]]:
    count, alive = len(layers), list[object]()
    pointers = (ctypes.c_void_p * count)(*(ctypes.addressof(layer.fields) for layer in layers))
    told, asked, found, spoken = list[_Read](), list[StepFields](), list[Passed](), list[Spoken]()
    for one in reads:
        fields, kept, passed = _fields(layers[0], one)
        told, found = [*told, fields], [*found, passed]
        alive.append(kept)
    for step in steps:
        out, before = torch.empty_like(step.x), torch.empty_like(step.x)
        given, held = fields_of(step, before, out)
        asked, spoken = [*asked, given], [*spoken, (out, before)]
        alive.append(held)
    beside = ctypes.byref(asked[0]) if asked else None
    _functions().read_many(pointers, count, (_Read * len(told))(*told), len(told), beside)
    return found, spoken


def _fields(layer: Layer, one: Read) -> tuple[_Read, tuple[object, ...], Passed]:
    """A prompt's pass as C++ is told of it, what has to stay alive for that, and where its results will be."""
    (b, s, width), fields, memory = one.x.shape, layer.fields, one.memory
    last = min(one.last, s) or s
    heads = fields.heads * fields.head_dim
    work = one.x.new_empty(b * s * (2 * heads + 2 * fields.kv_heads * fields.head_dim) + b * last * width)
    x, cos, sin = one.x.contiguous(), one.cos.contiguous(), one.sin.contiguous()
    before, out = torch.empty_like(x), x.new_empty(b, last, width)
    pieces = [(ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts)) for parts in (memory.keys, memory.values)]
    where = *(ctypes.cast(piece, ctypes.c_void_p) for piece in pieces), memory.places.data_ptr()
    lying = _Memory(*memory.strides, memory.start, memory.behind)
    given, found = (x.data_ptr(), cos.data_ptr(), sin.data_ptr()), (work.data_ptr(), before.data_ptr(), out.data_ptr())
    return _Read(*given, *where, lying, *found, b, s, last), (work, x, cos, sin, pieces), (out, before)


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
