"""Files of tensors that are written whole or not at all, and one shape of checkpoint for every training run to go on from."""

import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmsdk.errors import InputError

__all__ = ["resume", "save", "write"]


class Facts(dict[str, str]):
    """What a checkpoint says of itself. Raises InputError where it does not say what is asked for."""

    def __init__(self, path: Path, facts: Mapping[str, str]) -> None:
        super().__init__(facts)
        self._path = path

    def __missing__(self, key: str) -> str:
        raise InputError(f"this checkpoint does not say its {key}; name another folder, or remove it to begin anew", item=str(self._path))


_NOTHING: Mapping[str, str] = MappingProxyType({})


def write(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str] = _NOTHING) -> None:
    """Write tensors, from whatever device, beside their place, and move them there once they are whole."""
    part = path.with_suffix(".part")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, metadata=dict(facts) or None)
    os.replace(part, path)


def save(path: Path, parts: Mapping[str, Mapping[str, Tensor]], optimiser: torch.optim.Optimizer, facts: Mapping[str, str]) -> None:
    """Keep all that going on needs: the parts that learn, what the optimiser remembers of them, and facts such as the step."""
    tensors = {f"{part}.{name}": tensor for part, own in parts.items() for name, tensor in own.items()}
    for number, slots in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{number}.{name}": tensor for name, tensor in slots.items()}
    write(path, tensors, facts)


def resume(path: Path, optimiser: torch.optim.Optimizer, recipe: str = "") -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
    """The parts and the facts that `save` was given; the optimiser, a new one, remembers what that one did.

    Raises InputError where a recipe is named and the checkpoint is of another one, or tells none. So does asking for a fact that it lacks.
    """
    with safe_open(path, framework="pt") as file:
        facts = Facts(path, file.metadata() or {})
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file is no mapping
    if recipe and facts["recipe"] != recipe:
        raise InputError(f"it was made by {facts['recipe']}, this is {recipe}; name another folder", item=str(path))
    # clips once kept their step among the tensors
    if "step" in tensors:
        facts["step"] = str(int(tensors.pop("step")))
    parts = defaultdict[str, dict[str, Tensor]](dict)
    for key, tensor in tensors.items():
        part, _, name = key.partition(".")
        parts[part][name] = tensor
    state = optimiser.state_dict()
    for key, tensor in parts.pop("optimiser", {}).items():
        number, slot = key.split(".")
        state["state"].setdefault(int(number), {})[slot] = tensor
    optimiser.load_state_dict(state)
    return parts, facts
