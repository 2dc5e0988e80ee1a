"""Blocks of tokens kept in fewer bits, as C++ reads them in a decode step (`mmsdk.kernels.cpu.layer.run`).

`Aged.of` takes what a store keeps of every layer, once; `Aged.among` names the blocks of one step. Which form is which rounding
`mmsdk.kv.rounding` says; codes lie [blocks page g p], scales and lows are float16.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

__all__ = ["FORMS", "QUERIES", "Aged", "Kept"]

# As in rounded.h.
FORMS = ("int8", "int4", "int2", "fp8", "turbo4", "turbo2")
# Queries of a head of keys at most.
QUERIES = 32
_LEVELS = 16


@dataclass(frozen=True, slots=True)
class Kept:
    """Keys or values of all layers: codes, and what they are scaled by and added to, which have one for a channel or for a token."""

    codes: UInt8[Tensor, "layers blocks page g p"]
    scale: Float[Tensor, "layers blocks #page g #d"]
    low: Float[Tensor, "layers blocks #page g #d"]


class AgedFields(ctypes.Structure):
    """What C++ reads of one layer."""

    _fields_ = [
        ("form", ctypes.c_long),
        ("page", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key_scale", "key_low", "value_scale", "value_low", "table", "rotation")),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Aged:
    """Some layers' blocks in memory, what keeps them alive, and which block belongs to which row, all of a row side by side."""

    fields: "ctypes.Array[AgedFields]"
    parts: tuple[Tensor, ...]
    first: int = 0
    columns: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, form: str, keys: Kept, values: Kept, table: Float[Tensor, " n"], rotation: Float[Tensor, "d d"]) -> "Aged":
        """All layers, without blocks of a row; table and rotation are those of the forms called turbo."""
        levels = torch.zeros(_LEVELS)
        levels[: len(table)], rotation = table, rotation.contiguous()
        parts = (keys.codes, values.codes, keys.scale, keys.low, values.scale, values.low)
        assert all(part.is_contiguous() for part in parts), "as they were made"
        page, turning = keys.codes.shape[2], (levels.data_ptr(), rotation.data_ptr())
        fields = [
            AgedFields(FORMS.index(form), page, *(part[layer].data_ptr() for part in parts), *turning) for layer in range(len(parts[0]))
        ]
        return cls((AgedFields * len(fields))(*fields), (*parts, levels, rotation))

    def among(self, first: int, columns: Sequence[tuple[int, int]]) -> "Aged":
        """From a layer on, the blocks (row, block) of a step."""
        return replace(self, first=first, columns=tuple(columns))

    @property
    def address(self) -> int:
        """Where the fields of the first layer are."""
        return ctypes.addressof(self.fields) + self.first * ctypes.sizeof(AgedFields)
