"""A decoder layer of grouped-query attention and a gated MLP, for the newest token of a few rows.

    qkv = project(layer, x, cos, sin)               # [m, h + 2 g, d]
    seen = attend(layer, query, keys, values)       # [m, h, d], where the cache is one piece of memory
    x = finish(layer, x, seen)                      # [m, width]
    x, before = run(layers, x, cos, sin, place)     # all of it, layer after layer, storing the new keys and values

Everything is bfloat16, and rounded where these functions give it back. What a layer points to must stay as it is. All of it needs
`library().functions`.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.kernels.cpu.library import library
from mmsdk.kernels.cpu.matrix import Matrix, MatrixFields
from mmsdk.kernels.cpu.rounded import Aged

__all__ = ["FEW", "Layer", "Place", "Step", "StepFields", "attend", "attends", "fields_of", "finish", "project", "run"]

# Up to so many rows a step is reading weights: they are one side of a tile of AMX.
FEW = 16
# Of a head's channels a step of attention takes 32, and no head has more than this.
_STEP, _WIDEST = 32, 256


class _Fields(ctypes.Structure):
    _fields_ = [
        *((name, MatrixFields) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("norm1", "norm2", "q_norm", "k_norm")),
        *((name, ctypes.c_float) for name in ("eps", "query_scale")),
        *((name, ctypes.c_long) for name in ("width", "heads", "kv_heads", "head_dim", "inner", "gelu")),
    ]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step finds the keys and values of some layers, a piece of memory each, and leaves those of the new token of each row.

    `pieces` are of each row: (first element, number of tokens), the new one among them, which begins at element `newest`. `head` and
    `token` are the strides from a head to the next and from a token to the next, in elements, and the same for keys and values.
    `aged`, where there is any, are each row's tokens before these.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    head: int
    token: int
    pieces: Sequence[Sequence[tuple[int, int]]]
    newest: Sequence[int]
    aged: Aged | None = None

    def among(self, layers: slice) -> "Place":
        """Those of some of these layers."""
        aged = None if self.aged is None else self.aged.among(self.aged.first + (layers.start or 0), self.aged.columns)
        return replace(self, keys=self.keys[layers], values=self.values[layers], aged=aged)


class StepFields(ctypes.Structure):
    """`Said` of prompt.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "cosine", "sine", "keys", "values")),
        *((name, ctypes.c_long) for name in ("head", "token")),
        *((name, ctypes.c_void_p) for name in ("newest", "pieces")),
        ("parts", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("aged", "columns")),
        ("old", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("before", "out")),
        ("m", ctypes.c_long),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A step of a few rows, to go through layers beside prompts (`mmsdk.kernels.cpu.prompt.read_beside`); what is in it is as in `run`."""

    x: Float[Tensor, "m w"]
    cos: Float[Tensor, "m f"]
    sin: Float[Tensor, "m f"]
    place: Place


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """What the library is handed, and what keeps it alive."""

    fields: _Fields
    parts: tuple[Matrix | Tensor, ...]

    @classmethod
    def of(
        cls,
        matrices: tuple[Matrix, Matrix, Matrix, Matrix],
        norms: tuple[Tensor, Tensor],
        head_norms: tuple[Tensor, ...],
        heads: tuple[int, int, int],
        eps: float,
        query_scale: float,
        gelu: bool,
    ) -> "Layer":
        """From qkv, o, gate_up and down, the weights of the norms in front of both halves and, if any, those of queries and keys.

        `heads` are h, g and d; `gelu` is its tanh form, and SiLU else.
        """
        assert all(norm.dtype == torch.bfloat16 and norm.is_contiguous() for norm in (*norms, *head_norms)), "bfloat16 norms"
        pointers = [norm.data_ptr() for norm in (*norms, *head_norms)] + [None] * (2 - len(head_norms))
        width, inner = len(norms[0]), matrices[2].rows // 2
        fields = _Fields(*(matrix.fields for matrix in matrices), *pointers, eps, query_scale, width, *heads, inner, gelu)
        return cls(fields, (*matrices, *norms, *head_norms))


def _functions() -> ctypes.CDLL:
    functions = library().functions
    assert functions is not None, "the library"
    return functions


def project(layer: Layer, x: Float[Tensor, "m w"], cos: Float[Tensor, "m f"], sin: Float[Tensor, "m f"]) -> Float[Tensor, "m n d"]:
    """Queries, keys and values of the normalised stream, n = h + 2 g heads, the first two turned; f = d / 2."""
    fields = layer.fields
    out = x.new_empty(len(x), fields.heads + 2 * fields.kv_heads, fields.head_dim)
    _functions().project(ctypes.byref(fields), x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), len(x))
    return out


def attends(keys: Float[Tensor, "*m d"], values: Float[Tensor, "*m d"]) -> bool:
    """Whether `attend` and `run` read such keys and values where they lie."""
    d, alike = keys.shape[-1], keys.dtype == values.dtype == torch.bfloat16 and keys.stride() == values.stride()
    return alike and keys.shape == values.shape and keys.stride(-1) == 1 and d % _STEP == 0 and d <= _WIDEST


def attend(
    layer: Layer, query: Float[Tensor, "m h d"], keys: Float[Tensor, "m g t d"], values: Float[Tensor, "m g t d"]
) -> Float[Tensor, "m h d"]:
    """softmax(q k^T / sqrt(d)) v over all t entries of each row. `attends` must hold; a query's heads lie side by side."""
    out, (step, head, token) = query.new_empty(query.shape), keys.stride()[:3]
    pieces = _numbers([number for row in range(len(query)) for number in (row, row * step, keys.shape[2])])
    where = query.data_ptr(), query.stride(0), keys.data_ptr(), values.data_ptr(), head, token
    _functions().attend(ctypes.byref(layer.fields), *where, pieces, len(query), out.data_ptr(), len(query))
    return out


def _numbers(values: Sequence[int]) -> "ctypes.Array[ctypes.c_long]":
    return (ctypes.c_long * len(values))(*values)


def finish(layer: Layer, x: Float[Tensor, "m w"], seen: Float[Tensor, "m n"]) -> Float[Tensor, "m w"]:
    """The stream after the layer, from the stream before it and from what its heads saw, side by side."""
    out = torch.empty_like(x)
    _functions().finish(ctypes.byref(layer.fields), x.data_ptr(), seen.data_ptr(), out.data_ptr(), len(x))
    return out


def run(
    layers: Sequence[Layer], x: Float[Tensor, "m w"], cos: Float[Tensor, "m f"], sin: Float[Tensor, "m f"], place: Place
) -> tuple[Float[Tensor, "m w"], Float[Tensor, "m w"]]:
    """The stream after these layers, and before the last of them; the new token of each row is stored where `place` says.

    All layers have the same sizes, and memory of the same shape and strides, for which `attends` must hold.
    """
    out, before, count = torch.empty_like(x), torch.empty_like(x), len(layers)
    pointers = (ctypes.c_void_p * count)(*(ctypes.addressof(layer.fields) for layer in layers))
    turns = x.data_ptr(), cos.data_ptr(), sin.data_ptr()
    _functions().run(pointers, count, *turns, *_where(place), before.data_ptr(), out.data_ptr(), len(x))
    return out, before


def fields_of(step: Step, before: Float[Tensor, "m w"], out: Float[Tensor, "m w"]) -> tuple[StepFields, tuple[object, ...]]:
    """A step as C++ is told of it, and what has to stay alive for that."""
    where = _where(step.place)
    turns = step.x.data_ptr(), step.cos.data_ptr(), step.sin.data_ptr()
    told = [ctypes.cast(one, ctypes.c_void_p) if isinstance(one, ctypes.Array) else one for one in where]
    return StepFields(*turns, *told, before.data_ptr(), out.data_ptr(), len(step.x)), (where, told)


def _where(place: Place) -> tuple[object, ...]:
    """Keys and values of each layer, strides, places of new tokens, pieces, and what has aged."""
    memory = [(ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts)) for parts in (place.keys, place.values)]
    pieces = [number for row, parts in enumerate(place.pieces) for part in parts for number in (row, *part)]
    aged = place.aged.columns if place.aged is not None else ()
    old = None if place.aged is None else place.aged.address, _numbers([number for pair in aged for number in pair]), len(aged)
    return *memory, place.head, place.token, _numbers(place.newest), _numbers(pieces), len(pieces) // 3, *old
