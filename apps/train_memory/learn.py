"""The training: seeded, resumable from its last checkpoint to the very same result, interruptible at any step."""

from collections.abc import Generator
from functools import partial
from pathlib import Path

import torch

from mmsdk.apps.descent import cosine, descend, learned
from mmsdk.apps.train_memory.lessons import loss_of
from mmsdk.apps.train_memory.student import Recipe, Student

__all__ = ["learn", "load"]


def learn(recipe: Recipe, folder: Path, until: int) -> Generator[tuple[int, float], None, None]:
    """Train up to step `until` (at most the recipe's), as `mmsdk.apps.descent.descend` says. A checkpoint is kept in the folder."""
    student = Student(recipe)
    optimiser = torch.optim.AdamW(student.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=1e-4)
    rate = partial(cosine, steps=recipe.steps, rate=recipe.rate, warmup=recipe.warmup, least=0.05)
    until = min(until, recipe.steps)
    return descend(student, optimiser, _path(folder, recipe), repr(recipe), until, rate, partial(loss_of, student, recipe))


def load(recipe: Recipe, folder: Path) -> tuple[Student, int]:
    """The student as its checkpoint has it, and the steps it has learnt for. Raises InputError where there is none of this recipe."""
    student = Student(recipe)
    done = learned(student, _path(folder, recipe), repr(recipe))
    return student.eval(), done


def _path(folder: Path, recipe: Recipe) -> Path:
    return folder / f"{recipe.condition}-{recipe.seed}.safetensors"
