"""The training: seeded, resumable from its last checkpoint to the very same result, interruptible at any step."""

from collections.abc import Generator
from functools import partial
from pathlib import Path

import torch

from mmsdk.apps.descent import cosine, descend, learned
from mmsdk.apps.kept import write
from mmsdk.apps.train_belt.lessons import Lessons
from mmsdk.apps.train_belt.student import Recipe, Student

__all__ = ["export", "learn", "load"]


def learn(lessons: Lessons, recipe: Recipe, folder: Path) -> Generator[tuple[int, float], None, None]:
    """Train from the folder's last checkpoint on, as `mmsdk.apps.descent.descend` says."""
    student = Student(recipe)
    student.measure(lessons.states[lessons.counts], lessons.actions[lessons.counts])
    optimiser = torch.optim.AdamW(student.parameters(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=1e-4, fused=True)
    rate = partial(cosine, steps=recipe.steps, rate=recipe.rate, warmup=recipe.warmup, least=0.02)
    return descend(student, optimiser, _path(folder, recipe), repr(recipe), recipe.steps, rate, partial(lessons.loss, student, recipe))


def load(recipe: Recipe, folder: Path) -> tuple[Student, int]:
    """The student as its checkpoint has it, and the steps it has learnt for. Raises InputError where there is none of this recipe."""
    student = Student(recipe)
    done = learned(student, _path(folder, recipe), repr(recipe))
    return student.eval(), done


def export(path: Path, student: Student, made: str) -> None:
    """Write what acts, 16-bit, whole or not at all; `made` says how it was made."""
    write(path, {name: tensor.half() for name, tensor in student.state_dict().items()}, {"made": made})


def _path(folder: Path, recipe: Recipe) -> Path:
    return folder / f"{recipe.condition}-{recipe.seed}.safetensors"
