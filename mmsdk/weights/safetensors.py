"""Tensors of a folder in the Hugging Face layout: one `model.safetensors`, or shards and their index. Files are mapped, never unpickled.

A checkpoint that exists only as pickle (`.bin`, `.pt`) is refused: opening one runs whatever code is in it.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import safetensors
from torch import Tensor

from mmsdk.errors import ModelError, WeightsError
from mmsdk.vision.values import cause
from mmsdk.weights.fields import read_fields

__all__ = ["Checkpoint", "open_checkpoint", "open_file"]

_MOST_NAMED = 12
_BYTES = MappingProxyType({"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2})


def _to_nobody(size: int) -> None:
    """Tells nobody."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a folder by name, each with the open file that holds it; `stored` are the files' own names where they differ.

    `advance` is told the bytes of each tensor when it is read.
    """

    folder: Path
    files: Mapping[str, safetensors.safe_open]
    stored: Mapping[str, str] = field(default_factory=dict)
    advance: Callable[[int], None] = field(default=_to_nobody, compare=False)

    @property
    def size(self) -> int:
        """Bytes of all its tensors, by the headers."""
        slices = [file.get_slice(self.told(name)) for name, file in self.files.items()]
        return sum(math.prod(one.get_shape()) * _BYTES.get(one.get_dtype(), 1) for one in slices)

    def shape(self, name: str) -> tuple[int, ...]:
        """Rows first. Raises ModelError where there is no such tensor."""
        return tuple(self._file(name).get_slice(self.told(name)).get_shape())

    def tensor(self, name: str) -> Tensor:
        """The tensor as it is stored, mapped from the file. Raises ModelError where there is none, or its values are no floats."""
        tensor = self.raw(name)
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            told = f"the tensor {self.told(name)!r} is stored as {tensor.dtype}"
            raise ModelError(f"{self.folder}: {told}; quantised checkpoints are not supported")
        return tensor

    def raw(self, name: str) -> Tensor:
        """The same whatever its values are. Raises ModelError where there is no such tensor."""
        try:
            tensor: Tensor = self._file(name).get_tensor(self.told(name))
        except safetensors.SafetensorError as error:
            raise WeightsError(f"{self.folder}: the tensor {self.told(name)!r} cannot be read: {error}") from error
        self.advance(tensor.nbytes)
        return tensor

    def read(self, name: str, out: Tensor) -> None:
        """Write the tensor's values to `out`, which has its shape, in the dtype of `out`. Raises as `tensor` does."""
        out.copy_(self.tensor(name))

    def where(self, name: str) -> str:
        """What messages call a tensor: the folder, and its name there."""
        return f"{self.folder}: the tensor {self.told(name)!r}"

    def told(self, name: str) -> str:
        """What the file calls a tensor; one that it lacks, as it calls those around it."""
        head = name.partition(".")[0] + "."
        near = (their[: len(their) - len(our) + len(head)] for our, their in self.stored.items() if our.startswith(head))
        return self.stored.get(name) or next((start + name.removeprefix(head) for start in near), name)

    def renamed(self, rules: Sequence[tuple[str, str]]) -> "Checkpoint":
        """The same tensors under other names, by regular expressions and what takes their place, one rule after another.

        Raises ModelError where two come to have one name.
        """
        names = {name: _by(rules, name) for name in self.files}
        new = {names[name]: file for name, file in self.files.items()}
        if len(new) < len(names):
            twice = sorted({told for told in names.values() if list(names.values()).count(told) > 1})
            raise ModelError(f"{self.folder} holds the tensor {twice[0]!r} twice, under two of its names")
        return replace(self, files=new, stored={new: self.told(old) for old, new in names.items()})

    def under(self, prefix: str, becomes: str = "") -> "Checkpoint":
        """Only the tensors whose names begin so; something else stands there instead."""
        names = {name: becomes + name.removeprefix(prefix) for name in self.files if name.startswith(prefix)}
        files = {new: self.files[old] for old, new in names.items()}
        return replace(self, files=files, stored={new: self.told(old) for old, new in names.items()})

    def beside(self, other: "Checkpoint") -> "Checkpoint":
        """The tensors of both."""
        return replace(self, files={**self.files, **other.files}, stored={**self.stored, **other.stored})

    def only(self, *prefixes: str) -> None:
        """Raises ModelError, naming them, where tensors begin in another way: a family that does not know them cannot run them."""
        unknown = [self.told(name) for name in self.files if not name.startswith(prefixes)]
        if unknown:
            raise ModelError(f"{self.folder} holds a tensor {_list(unknown)} that no part of this family has a use for")

    def fit(self, wanted: AbstractSet[str], part: str, spare: str = "") -> None:
        """Raises ModelError, naming them, where tensors of `part` are missing, or left over and not of the pattern `spare`."""
        missing = wanted - self.files.keys()
        if missing:
            raise ModelError(f"{self.folder} lacks the tensor {_list(sorted(map(self.told, missing)))}")
        unknown = [self.told(name) for name in self.files.keys() - wanted if not re.fullmatch(spare, name)]
        if unknown:
            raise ModelError(f"{self.folder} holds a tensor {_list(sorted(unknown))} that {part} has no use for")

    def _file(self, name: str) -> safetensors.safe_open:
        if name not in self.files:
            raise ModelError(f"{self.folder} lacks the tensor {self.told(name)!r}")
        return self.files[name]


def open_checkpoint(folder: Path, stem: str = "model") -> Checkpoint:
    """Map the safetensors files of a folder, named by `stem`. Raises WeightsError where there are none, or one is damaged or missing."""
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if index.is_file():
        return _sharded(index)
    if not single.is_file():
        raise WeightsError(f"{folder} has no {single.name} and no {index.name}{_pickles(folder)}")
    return open_file(single)


def open_file(path: Path) -> Checkpoint:
    """Map one safetensors file, of any name. Raises WeightsError where it is damaged or missing."""
    file = _opened(path)
    return Checkpoint(path.parent, dict.fromkeys(file.keys(), file))


def _by(rules: Sequence[tuple[str, str]], name: str) -> str:
    for pattern, becomes in rules:
        name = re.sub(pattern, becomes, name)
    return name


def _list(names: Sequence[str]) -> str:
    """Names for a message, the first of many."""
    shown, more = ", ".join(map(repr, names[:_MOST_NAMED])), len(names) - _MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def _sharded(index: Path) -> Checkpoint:
    table = read_fields(index).group("weight_map")
    places, folder = {name: table.text(name) for name in table.values}, index.parent
    shards = {shard: _opened(_inside(index, shard)) for shard in sorted(set(places.values()))}
    held = {shard: set(file.keys()) for shard, file in shards.items()}
    for name, shard in places.items():
        if name not in held[shard]:
            raise WeightsError(f"{folder / shard} lacks the tensor {name!r} that the index promises")
    return Checkpoint(folder, {name: shards[shard] for name, shard in places.items()})


def _inside(index: Path, shard: str) -> Path:
    """A shard's path. An index must not name files outside its folder, nor anything that is not safetensors."""
    if Path(shard).name != shard or not shard.endswith(".safetensors"):
        raise WeightsError(f"{index} names {shard!r}, which is not a safetensors file of its own folder")
    return index.parent / shard


def _opened(path: Path) -> safetensors.safe_open:
    try:
        return safetensors.safe_open(path, framework="pt")
    except (OSError, safetensors.SafetensorError) as error:
        raise WeightsError(f"{path} is missing or damaged: {cause(error)}") from error


def _pickles(folder: Path) -> str:
    found = sorted(path.name for path in folder.glob("*") if path.suffix in {".bin", ".pt", ".pth", ".ckpt", ".pkl"})
    return f"; {found[0]} is a pickle, which could run any code and is never opened: convert it to safetensors" if found else ""
