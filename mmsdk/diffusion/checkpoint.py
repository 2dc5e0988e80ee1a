"""Diffusers-layout checkpoints: a folder with `config.json` and safetensors, read into a model by a table of names.

A family (`mmsdk.diffusion.models`, one file each) says which model its settings give and what it calls each of our tensors. Nothing is
unpickled, and no tensor is left out or made up: what is missing, left over or of another shape is listed, all of it, before any is read.
What is written is there as a whole or not at all.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import safetensors.torch
import torch
from torch import nn

from mmsdk.errors import ModelError
from mmsdk.weights.fields import Fields, read_fields
from mmsdk.weights.safetensors import Checkpoint, open_checkpoint

__all__ = ["Family", "Layers", "Names", "attention", "read", "write", "write_weights"]

Model = TypeVar("Model", bound=nn.Module, covariant=True)

_MOST_NAMED = 8
_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "out": "to_out.0", "query_norm": "norm_q", "key_norm": "norm_k"}


@dataclass(frozen=True, slots=True)
class Layers:
    """What a family calls a list of layers, and the modules and parameters of one of them."""

    name: str
    table: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Names:
    """What a family calls the model's modules and parameters, and its lists of layers. What is not in a table is called as we do."""

    model: Mapping[str, str]
    lists: Mapping[str, Layers]

    def told(self, ours: str) -> str:
        """The family's name of one of our tensors."""
        for head, layers in self.lists.items():
            if ours.startswith(f"{head}."):
                number, _, inner = ours.removeprefix(f"{head}.").partition(".")
                return f"{layers.name}.{number}.{_by(layers.table, inner)}"
        return _by(self.model, ours)


@dataclass(frozen=True, slots=True)
class Family(Generic[Model]):
    """Class names that `config.json` may have for it, its model by its settings, without values, and its names."""

    classes: tuple[str, ...]
    build: Callable[[Fields], Model]
    names: Names


def attention(ours: str, theirs: str) -> dict[str, str]:
    """An attention's modules, as most classes of diffusers call them; `ours` is "" where they are a layer's own."""
    return {f"{ours}.{name}".removeprefix("."): f"{theirs}.{told}" for name, told in _ATTENTION.items()}


def read(folder: Path, family: Family[Model], dtype: torch.dtype, device: torch.device) -> Model:
    """The model of a folder, ready to run.

    Raises ModelError for settings of another family, and for tensors that are missing, unexpected or of another shape, naming them;
    WeightsError where files are missing or damaged, or are pickles.
    """
    fields = read_fields(folder / "config.json")
    found = fields.text("_class_name")
    if found not in family.classes:
        raise ModelError(f"{fields.where} is of a {found}, not of a {' or '.join(family.classes)}")
    with torch.device("meta"):
        model = family.build(fields)
    checkpoint = open_checkpoint(folder, "diffusion_pytorch_model")
    wanted = {name: tuple(like.shape) for name, like in model.state_dict().items()}
    _fit(wanted, checkpoint, family.names)
    state = {}
    for name, shape in wanted.items():
        stored = checkpoint.tensor(family.names.told(name))
        state[name] = stored.reshape(shape).to(device, dtype, copy=True)
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()


def write_weights(path: Path, module: nn.Module, dtype: torch.dtype) -> None:
    """Write a module's tensors, each in a dtype, by our names. Raises OSError as the disk does."""
    state = {name: value.detach().to("cpu", dtype).contiguous() for name, value in module.state_dict().items()}
    write(path, safetensors.torch.save(state))


def write(path: Path, content: bytes) -> None:
    """Write a file beside its place, and move it there once it is whole. Raises OSError as the disk does."""
    part = path.with_suffix(".part")
    part.write_bytes(content)
    os.replace(part, path)


def _by(table: Mapping[str, str], ours: str) -> str:
    module, _, leaf = ours.rpartition(".")
    return table.get(ours) or f"{table.get(module, module)}.{leaf}".removeprefix(".")


def _fit(wanted: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint, names: Names) -> None:
    told = {names.told(ours): shape for ours, shape in wanted.items()}
    missing = [name for name in told if name not in checkpoint.files]
    unexpected = [name for name in checkpoint.files if name not in told]
    shapes = {name: checkpoint.shape(name) for name in told if name in checkpoint.files}
    misshaped = [f"{name} {shape}, not {told[name]}" for name, shape in shapes.items() if not _same(shape, told[name])]
    wrong = {"missing": missing, "unexpected": unexpected, "misshaped": misshaped}
    if any(wrong.values()):
        raise ModelError(f"{checkpoint.folder}: " + "; ".join(f"{kind}: {_list(found)}" for kind, found in wrong.items() if found))


def _same(stored: tuple[int, ...], ours: tuple[int, ...]) -> bool:
    """A table may have an axis in front, for the batch; a convolution over patches is a matrix of its first axis and all others."""
    return stored in (ours, (1, *ours)) or (len(stored) > 2 and (stored[0], math.prod(stored[1:])) == ours)


def _list(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(sorted(names)[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
