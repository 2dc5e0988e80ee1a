"""A block of a vision transformer for many rows: all but its attention, for which there is `mmsdk.kernels.cpu.prompt.attend`.

    qkv = project(block, x)         # [m, 3 width], of the normalised stream
    x = add(block, x, seen)         # [m, width], seen is what the heads saw, side by side
    x = feed(block, x)              # [m, width]

Everything is bfloat16, summed in float32 and rounded where these functions give it back, and in what the MLP has inside. Weights are read
as they lie. All of it needs `prompt.ready()`, and a block that `fits`.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.kernels.cpu.library import library
from mmsdk.kernels.cpu.matrix import Matrix, MatrixFields

__all__ = ["Block", "add", "feed", "fits", "project"]

# As block.cpp counts them.
_ACTIVATIONS: Mapping[str, int] = MappingProxyType({"gelu": 0, "gelu_tanh": 1, "quick_gelu": 2, "silu": 3})
# Columns of a tile.
_STEP = 32


class _Fields(ctypes.Structure):
    """`Block` of block.cpp."""

    _fields_ = [
        *((name, MatrixFields) for name in ("qkv", "o", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("norm1", "bias1", "norm2", "bias2", "scale1", "scale2")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_long) for name in ("width", "inner", "activation")),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """What the library is handed, and what keeps it alive."""

    fields: _Fields
    parts: tuple[Matrix | Tensor, ...]

    @classmethod
    def of(
        cls,
        matrices: tuple[Matrix, Matrix, Matrix, Matrix],
        vectors: Sequence[Tensor],
        eps: float,
        activation: str,
    ) -> "Block":
        """From qkv, o, up and down; vectors are weight and bias of both norms, and, if any, the scales of both updates by channel."""
        assert all(part.dtype == torch.bfloat16 and part.is_contiguous() for part in vectors), "bfloat16 norms and scales"
        width, inner = len(vectors[0]), matrices[2].rows
        sizes = [(one.rows, int(one.fields.columns)) for one in matrices]
        assert sizes == [(3 * width, width), (width, width), (inner, width), (width, inner)], "q, k and v as wide as the stream"
        pointers = [part.data_ptr() for part in vectors] + [None] * (6 - len(vectors))
        fields = _Fields(*(one.fields for one in matrices), *pointers, eps, width, inner, _ACTIVATIONS[activation])
        return cls(fields, (*matrices, *vectors))


def fits(width: int, inner: int, activation: str) -> bool:
    """Whether all that is summed over are whole tiles, and the activation is one of gelu, gelu_tanh, quick_gelu and silu."""
    return width % _STEP == 0 and inner % _STEP == 0 and activation in _ACTIVATIONS


def project(block: Block, x: Float[Tensor, "m w"]) -> Float[Tensor, "m n"]:
    """Queries, keys and values, n = 3 w."""
    out = x.new_empty(len(x), 3 * x.shape[1])
    _functions().block_project(ctypes.byref(block.fields), x.data_ptr(), out.data_ptr(), len(x))
    return out


def add(block: Block, x: Float[Tensor, "m w"], seen: Float[Tensor, "m w"]) -> Float[Tensor, "m w"]:
    """The stream after attention."""
    out = torch.empty_like(x)
    _functions().block_add(ctypes.byref(block.fields), x.data_ptr(), seen.data_ptr(), out.data_ptr(), len(x))
    return out


def feed(block: Block, x: Float[Tensor, "m w"]) -> Float[Tensor, "m w"]:
    """The stream after the MLP."""
    out = torch.empty_like(x)
    _functions().block_feed(ctypes.byref(block.fields), x.data_ptr(), out.data_ptr(), len(x))
    return out


def _functions() -> ctypes.CDLL:
    functions = library().functions
    assert functions is not None, "asked whether it is here"
    return functions
