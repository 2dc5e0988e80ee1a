"""A training loop: resumable to the very same result, interruptible at any step."""

import math
from collections.abc import Callable, Generator
from pathlib import Path

import torch
from torch import Tensor, nn

from mmsdk.apps import kept
from mmsdk.errors import InputError

__all__ = ["cosine", "descend", "learned"]

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
    for step in range(_resume(path, recipe, student, optimiser), until):
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


def learned(student: nn.Module, path: Path, recipe: str) -> int:
    """Give the student what its checkpoint knows, and say how many steps that took. Raises InputError where none is of this recipe."""
    done = _resume(path, recipe, student, torch.optim.AdamW(student.parameters()))
    if not done:
        raise InputError("there is no checkpoint; train first", item=str(path.parent))
    return done


def _resume(path: Path, recipe: str, student: nn.Module, optimiser: torch.optim.Optimizer) -> int:
    """Load the checkpoint, if there is one, and say how many steps it has learnt for. Raises InputError for one of another recipe."""
    if not path.exists():
        return 0
    parts, facts = kept.resume(path, optimiser, recipe)
    student.load_state_dict(parts["student"])
    return int(facts["step"])


def _save(path: Path, recipe: str, step: int, student: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    kept.save(path, {"student": student.state_dict()}, optimiser, {"step": str(step), "recipe": recipe})
