"""Tensors of a folder in the Hugging Face layout: one `model.safetensors`, or shards and their index. Files are mapped, never unpickled.

A checkpoint that exists only as pickle (`.bin`, `.pt`) is refused: opening one runs whatever code is in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
from torch import Tensor

from mmsdk.errors import ModelError, WeightsError
from mmsdk.weights.fields import read_fields

__all__ = ["Checkpoint", "open_checkpoint"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a folder by name, each with the open file that holds it."""

    folder: Path
    files: Mapping[str, safetensors.safe_open]

    def shape(self, name: str) -> tuple[int, ...]:
        """Rows first. Raises ModelError where there is no such tensor."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def read(self, name: str, out: Tensor) -> None:
        """Write the tensor's values to `out`, which has its shape, in the dtype of `out`. Raises ModelError where they are no floats."""
        try:
            tensor = self._file(name).get_tensor(name)
        except safetensors.SafetensorError as error:
            raise WeightsError(f"{self.folder}: the tensor {name!r} cannot be read: {error}") from error
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ModelError(f"{self.folder}: the tensor {name!r} is stored as {tensor.dtype}; quantised checkpoints are not supported")
        out.copy_(tensor)

    def _file(self, name: str) -> safetensors.safe_open:
        if name not in self.files:
            raise ModelError(f"{self.folder} lacks the tensor {name!r}")
        return self.files[name]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Map the safetensors files of a folder. Raises WeightsError where there are none, or one is damaged or missing."""
    if (folder / _INDEX).is_file():
        return _sharded(folder)
    if not (folder / _SINGLE).is_file():
        raise WeightsError(f"{folder} has no {_SINGLE} and no {_INDEX}{_pickles(folder)}")
    file = _opened(folder / _SINGLE)
    return Checkpoint(folder, dict.fromkeys(file.keys(), file))


def _sharded(folder: Path) -> Checkpoint:
    table = read_fields(folder / _INDEX).group("weight_map")
    places = {name: table.text(name) for name in table.values}
    shards = {shard: _opened(_inside(folder, shard)) for shard in sorted(set(places.values()))}
    held = {shard: set(file.keys()) for shard, file in shards.items()}
    for name, shard in places.items():
        if name not in held[shard]:
            raise WeightsError(f"{folder / shard} lacks the tensor {name!r} that the index promises")
    return Checkpoint(folder, {name: shards[shard] for name, shard in places.items()})


def _inside(folder: Path, shard: str) -> Path:
    """A shard's path. An index must not name files outside its folder, nor anything that is not safetensors."""
    if Path(shard).name != shard or not shard.endswith(".safetensors"):
        raise WeightsError(f"{folder / _INDEX} names {shard!r}, which is not a safetensors file of its own folder")
    return folder / shard


def _opened(path: Path) -> safetensors.safe_open:
    try:
        return safetensors.safe_open(path, framework="pt")
    except (OSError, safetensors.SafetensorError) as error:
        raise WeightsError(f"{path} is missing or damaged: {error}") from error


def _pickles(folder: Path) -> str:
    found = sorted(path.name for path in folder.glob("*") if path.suffix in {".bin", ".pt", ".pth", ".ckpt", ".pkl"})
    return f"; {found[0]} is a pickle, which could run any code and is never opened: convert it to safetensors" if found else ""
