"""What was trained for mini, as one safetensors file: the projector, and a low-rank update of the language model's matrices.

Tensors are named `projector.*` and `lora.{layer}.{matrix}.{a|b}` with matrix one of qkv, o, gate_up, down; the update of a matrix is
b @ a, with LoRA's scale already in b (LoRA: Low-Rank Adaptation of Large Language Models, arXiv 2106.09685). It is added to the weights
once, at load, and costs nothing afterwards. Metadata `middle` names the encoder's layers, as in "3,7", that the projector reads beside
the last one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from jaxtyping import Float
from torch import Tensor, nn

from mmsdk.errors import ModelError

__all__ = ["Adapter", "Update", "changed", "merge", "read_adapter"]

_PARTS = {"qkv": "attention", "o": "attention", "gate_up": "mlp", "down": "mlp"}
_LORA = re.compile(r"lora\.(\d+)\.(qkv|o|gate_up|down)\.([ab])")


@dataclass(frozen=True, slots=True)
class Update:
    """A low-rank change of one matrix: b @ a."""

    a: Float[Tensor, "r i"]
    b: Float[Tensor, "o r"]


@dataclass(frozen=True, slots=True)
class Adapter:
    """The projector's state, the updates by (layer, matrix), and the encoder's further layers that the projector reads, from a file."""

    path: Path
    projector: Mapping[str, Tensor]
    updates: Mapping[tuple[int, str], Update]
    middle: tuple[int, ...] = ()


def read_adapter(path: Path) -> Adapter:
    """Read the file. Raises ModelError where it cannot be read, or a tensor is unknown or lacks its other half."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file is no mapping
            middle = tuple(int(part) for part in (file.metadata() or {}).get("middle", "").split(",") if part)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ModelError(f"{path} cannot be read as an adapter: {error}") from error
    projector = {name.removeprefix("projector."): tensor for name, tensor in tensors.items() if name.startswith("projector.")}
    halves: dict[tuple[int, str], dict[str, Tensor]] = {}
    for name in tensors.keys() - {f"projector.{part}" for part in projector}:
        found = _LORA.fullmatch(name)
        if found is None:
            raise ModelError(f"{path} holds a tensor {name!r} that is neither of the projector nor of a LoRA update")
        halves.setdefault((int(found[1]), found[2]), {})[found[3]] = tensors[name]
    return Adapter(path, projector, {place: _update(path, place, pair) for place, pair in halves.items()}, middle)


def changed(adapter: Adapter) -> frozenset[str]:
    """The decoder's tensors that the updates belong to, by their names in its state."""
    return frozenset(f"layers.{layer}.{_PARTS[matrix]}.{matrix}.weight" for layer, matrix in adapter.updates)


def merge(layers: nn.ModuleList, adapter: Adapter) -> None:
    """Add every update to the matrix it belongs to, in float32, in place.

    Raises ModelError where a layer is not there or a shape does not fit.
    """
    for (layer, matrix), update in adapter.updates.items():
        if layer >= len(layers):
            raise ModelError(f"{adapter.path}: lora.{layer}.{matrix} changes layer {layer}, the language model has {len(layers)}")
        (weight,) = (w for name, w in layers[layer].named_parameters() if name.split(".")[-2:] == [matrix, "weight"])
        # Before they are multiplied: two thin matrices of a bad file can make one larger than the memory.
        change = (len(update.b), update.a.shape[1])
        if change != weight.shape:
            raise ModelError(f"{adapter.path}: lora.{layer}.{matrix} changes a matrix of {change}, the model's is {tuple(weight.shape)}")
        with torch.no_grad():
            weight.copy_(weight.float() + update.b.float() @ update.a.float())


def _update(path: Path, place: tuple[int, str], pair: Mapping[str, Tensor]) -> Update:
    matrices = pair.keys() == {"a", "b"} and all(tensor.ndim == 2 for tensor in pair.values())
    if not matrices or pair["a"].shape[0] != pair["b"].shape[1]:
        shapes = {half: tuple(tensor.shape) for half, tensor in pair.items()}
        raise ModelError(f"{path}: lora.{place[0]}.{place[1]} needs a (r, in) and b (out, r), it has {shapes}")
    return Update(pair["a"].float(), pair["b"].float())
