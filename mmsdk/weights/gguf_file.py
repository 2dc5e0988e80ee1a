"""The container of a GGUF file: metadata and a table of tensors, read from the header; the tensors stay mapped on disk.

Format: ggml's gguf.md, versions 2 and 3, little endian. Nothing in the file is believed before it is checked: every count, length and
offset must lie within the file, so that a damaged or hostile one ends in a WeightsError and not in an exhausted memory.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mmsdk.errors import WeightsError
from mmsdk.vision.values import cause
from mmsdk.weights.gguf_blocks import unpack

__all__ = ["GGUFFile", "GGUFTensor", "Value", "read_file"]

Value = int | float | bool | str | list[str] | np.ndarray
"""A setting: a number, a text, or an array of either; arrays of numbers stay where they are in the mapped file."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor as stored: `shape` as torch counts it (rows first), `data` the raw blocks as bytes [rows, bytes per row]."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    data: UInt8[Tensor, "r c"]

    def read(self, out: Float[Tensor, "..."]) -> None:
        """Write the values to `out`, which has the tensor's shape. Raises WeightsError for a block format that cannot be read."""
        try:
            unpack(self.data, self.kind, out.view(-1, self.shape[-1]))
        except NotImplementedError as error:
            raise WeightsError(f"tensor {self.name!r} is stored as {self.kind.name}, which cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """What a file holds."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GGUFTensor]


def read_file(path: Path) -> GGUFFile:
    """Map a file and read its header. Raises WeightsError where it is no GGUF file or anything in it does not add up."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {cause(error)}") from error
    try:
        return _parsed(path, _Cursor(data))
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise WeightsError(f"{path} is damaged or no GGUF file: {error}") from error


class _Cursor:
    """Reads forward through the header. A read past the end raises struct.error or ValueError."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.size = len(data)
        self.place = 0

    def number(self, code: str) -> int:
        (value,) = struct.unpack_from("<" + code, self.data, self.place)
        self.place += struct.calcsize("<" + code)
        return int(value)

    def text(self) -> str:
        length = self.number("Q")
        self.check(length)
        start, self.place = self.place, self.place + length
        return self.data[start : self.place].decode("utf-8")

    def texts(self, count: int) -> list[str]:
        # The vocabulary and the merges are a hundred thousand of these: no calls in between.
        read, data, size, place = struct.Struct("<Q").unpack_from, self.data, self.size, self.place
        found: list[str] = []
        for _ in range(count):
            start = place + 8
            place = start + read(data, place)[0]
            if place > size:
                raise ValueError(f"a text at byte {start} ends at byte {place}, the file at {size}")
            found.append(data[start:place].decode("utf-8"))
        self.place = place
        return found

    def check(self, length: int) -> None:
        if length > self.size - self.place:
            raise ValueError(f"{length} bytes are announced at byte {self.place}, the file has {self.size - self.place} more")

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind} at byte {self.place}")
        value: int | float | bool = self.numbers(_SCALARS[kind], 1)[0].item()
        return value

    def array(self) -> list[str] | np.ndarray:
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind], count)
        if kind != _STRING:
            # An empty array takes twelve bytes in the file and ten times as many here; no model has a setting made of arrays.
            raise ValueError(f"an array of values of type {kind} at byte {self.place}; only numbers and texts are read")
        # A text takes eight bytes at least, so an announced count beyond them is a lie.
        self.check(8 * count)
        return self.texts(count)

    def numbers(self, code: str, count: int) -> np.ndarray:
        """A view of the file: Python's own numbers would take sixteen times its size."""
        kind = np.dtype("<" + code)
        self.check(count * kind.itemsize)
        start, self.place = self.place, self.place + count * kind.itemsize
        return np.frombuffer(self.data, kind, count, start) if count else np.empty(0, kind)


def _parsed(path: Path, cursor: _Cursor) -> GGUFFile:
    if cursor.data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    cursor.place = 4
    version = cursor.number("I")
    if version not in (2, 3):
        raise ValueError(f"version {version} is not supported; 2 and 3 are (a big-endian file must be converted)")
    tensors, pairs = cursor.number("Q"), cursor.number("Q")
    cursor.check(tensors)
    cursor.check(pairs)
    metadata: dict[str, Value] = {}
    for _ in range(pairs):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("I"))
    table = [_entry(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = -(-cursor.place // alignment) * alignment
    found = {entry[0]: _mapped(cursor, start, *entry) for entry in table}
    if len(found) != len(table):
        raise ValueError("two tensors have the same name")
    return GGUFFile(path, metadata, found)


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, rank = cursor.text(), cursor.number("I")
    if not 1 <= rank <= 4:
        raise ValueError(f"tensor {name!r} has {rank} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(rank))[::-1]
    return name, shape, cursor.number("I"), cursor.number("Q")


def _mapped(cursor: _Cursor, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
    try:
        stored = gguf.GGMLQuantizationType(kind)
    except ValueError as error:
        raise ValueError(f"tensor {name!r} is of an unknown type {kind}") from error
    block, size = gguf.GGML_QUANT_SIZES[stored]
    if not all(shape) or shape[-1] % block:
        raise ValueError(f"tensor {name!r} of shape {shape} cannot be stored as {stored.name}")
    row = shape[-1] // block * size
    length, first = math.prod(shape[:-1]) * row, start + offset
    if first + length > cursor.size:
        raise ValueError(f"tensor {name!r} ends at byte {first + length}, the file at {cursor.size}")
    data = torch.frombuffer(cursor.data, dtype=torch.uint8, count=length, offset=first)
    return GGUFTensor(name, shape, stored, data.view(-1, row))
