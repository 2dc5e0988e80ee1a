"""A training loop and its checkpoint: resumable to the very same result, interruptible at any step."""

import math
import os
from collections.abc import Callable, Generator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from mmsdk.errors import InputError

__all__ = ["cosine", "descend", "resume"]

_EVERY = 200


def cosine(step: int, steps: int, rate: float, warmup: int, least: float) -> float:
    """A learning rate that rises in a line for `warmup` steps, then falls to `least` of it in a half cosine."""
    if step < warmup:
        return rate * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return rate * (least + (1 - least) * 0.5 * (1 + math.cos(math.pi * done)))


def descend(
    student: nn.Module,
    optimiser: torch.optim.Optimizer,
    path: Path,
    recipe: str,
    until: int,
    rate: Callable[[int], float],
    loss: Callable[[int], Tensor],
) -> Generator[tuple[int, float], None, None]:
    """Train from the checkpoint on, if there is one, up to step `until`, telling (steps done, loss) after each; gradients are clipped at 1.

    Closing the iterator keeps what was learnt so far; an interruption from outside loses at most 200 steps. Raises InputError where the
    checkpoint is of another recipe.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for step in range(resume(path, recipe, student, optimiser), until):
        for group in optimiser.param_groups:
            group["lr"] = rate(step)
        lost = loss(step)
        optimiser.zero_grad()
        lost.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimiser.step()
        if (step + 1) % _EVERY == 0 or step + 1 == until:
            _save(path, recipe, step + 1, student, optimiser)
        try:
            yield step + 1, float(lost.detach())
        except GeneratorExit:
            _save(path, recipe, step + 1, student, optimiser)
            raise


def resume(path: Path, recipe: str, student: nn.Module, optimiser: torch.optim.Optimizer) -> int:
    """Load the checkpoint, if there is one, and say how many steps it has learnt for. Raises InputError for one of another recipe."""
    if not path.exists():
        return 0
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if metadata["recipe"] != recipe:
        raise InputError(f"it was made by {metadata['recipe']}, this is {recipe}", item=str(path))
    student.load_state_dict({name.removeprefix("student."): tensor for name, tensor in tensors.items() if name.startswith("student.")})
    state = optimiser.state_dict()
    for name, tensor in tensors.items():
        if name.startswith("optimiser."):
            _, number, slot = name.split(".")
            state["state"].setdefault(int(number), {})[slot] = tensor
    optimiser.load_state_dict(state)
    return int(metadata["step"])


def _save(path: Path, recipe: str, step: int, student: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Everything that going on needs, written whole or not at all."""
    tensors = {f"student.{name}": tensor for name, tensor in student.state_dict().items()}
    for number, slots in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{number}.{name}": tensor for name, tensor in slots.items()}
    part = path.with_suffix(".part")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, metadata={"step": str(step), "recipe": recipe})
    os.replace(part, path)
