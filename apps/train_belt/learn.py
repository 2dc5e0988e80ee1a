"""The training loop: seeded, resumable from its last checkpoint to the very same result, interruptible at any step."""

import math
import os
from collections.abc import Generator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mmsdk.apps.train_belt.lessons import Lessons
from mmsdk.apps.train_belt.student import Recipe, Student
from mmsdk.errors import InputError

__all__ = ["export", "learn", "load"]

_EVERY = 200


def rate_at(recipe: Recipe, step: int) -> float:
    """Warm up in a line, then fall to a fiftieth in a half cosine."""
    if step < recipe.warmup:
        return recipe.rate * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def learn(lessons: Lessons, recipe: Recipe, folder: Path) -> Generator[tuple[int, float], None, None]:
    """Train from the folder's last checkpoint on, telling (steps done, loss) after each step.

    Closing the iterator keeps what was learnt so far; an interruption from outside loses at most 200 steps.
    Raises InputError where the folder's checkpoint is of another recipe.
    """
    student = Student(recipe)
    student.measure(lessons.states[lessons.counts], lessons.actions[lessons.counts])
    optimiser = torch.optim.AdamW(student.parameters(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=1e-4)
    folder.mkdir(parents=True, exist_ok=True)
    for step in range(resume(recipe, folder, student, optimiser), recipe.steps):
        for group in optimiser.param_groups:
            group["lr"] = rate_at(recipe, step)
        loss = lessons.loss(student, recipe, step)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimiser.step()
        if (step + 1) % _EVERY == 0 or step + 1 == recipe.steps:
            save(recipe, folder, step + 1, student, optimiser)
        try:
            yield step + 1, float(loss.detach())
        except GeneratorExit:
            save(recipe, folder, step + 1, student, optimiser)
            raise


def load(recipe: Recipe, folder: Path) -> tuple[Student, int]:
    """The student as its checkpoint has it, and the steps it has learnt for. Raises InputError where there is none of this recipe."""
    student = Student(recipe)
    done = resume(recipe, folder, student, torch.optim.AdamW(student.parameters()))
    if not done:
        raise InputError("there is no checkpoint; train first", item=str(folder))
    return student.eval(), done


def save(recipe: Recipe, folder: Path, step: int, student: Student, optimiser: torch.optim.Optimizer) -> None:
    """Everything that going on needs, written whole or not at all."""
    tensors = {f"student.{name}": tensor for name, tensor in student.state_dict().items()}
    for number, slots in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{number}.{name}": tensor for name, tensor in slots.items()}
    part = _path(folder, recipe).with_suffix(".part")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, metadata={"step": str(step), "recipe": repr(recipe)})
    os.replace(part, _path(folder, recipe))


def resume(recipe: Recipe, folder: Path, student: Student, optimiser: torch.optim.Optimizer) -> int:
    """Load the checkpoint, if there is one, and say how many steps it has learnt for."""
    path = _path(folder, recipe)
    if not path.exists():
        return 0
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if metadata["recipe"] != repr(recipe):
        raise InputError(f"it was made by {metadata['recipe']}, this is {recipe!r}", item=str(path))
    student.load_state_dict({name.removeprefix("student."): tensor for name, tensor in tensors.items() if name.startswith("student.")})
    state = optimiser.state_dict()
    for name, tensor in tensors.items():
        if name.startswith("optimiser."):
            _, number, slot = name.split(".")
            state["state"].setdefault(int(number), {})[slot] = tensor
    optimiser.load_state_dict(state)
    return int(metadata["step"])


def export(path: Path, student: Student, made: str) -> None:
    """Write what acts, 16-bit, whole or not at all; `made` says how it was made."""
    tensors = {name: tensor.detach().half().contiguous() for name, tensor in student.state_dict().items()}
    save_file(tensors, path.with_suffix(".part"), metadata={"made": made})
    os.replace(path.with_suffix(".part"), path)


def _path(folder: Path, recipe: Recipe) -> Path:
    return folder / f"{recipe.condition}-{recipe.seed}.safetensors"
