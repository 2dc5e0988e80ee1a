"""The training loop: seeded steps over pictures and clips in turn, and checkpoints that a later run resumes from exactly."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from mmsdk.apps import kept
from mmsdk.apps.descent import cosine
from mmsdk.apps.train_braco.distil import Lessons, divergence, read, shorter
from mmsdk.apps.train_braco.sets import Media, Set
from mmsdk.models.mini.family import Mini
from mmsdk.tokencomp.methods.braco import Braco

__all__ = ["Recipe", "learn"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The knobs; the same values and seed give the same batches. Every third step is of clips, where there are any."""

    steps: int = 400
    rate: float = 2e-3
    warmup: int = 10
    every: int = 25
    seed: int = 0


def learn(vlm: Mini, lessons: Lessons, sets: Sequence[Set], recipe: Recipe, folder: Path, stop_after: int | None = None) -> None:
    """Train the sets in place, from the last checkpoint in `folder` to the end (or `stop_after` steps); Ctrl-C loses at most `every` steps.

    A step draws one batch, has it read in full once, and teaches every set of its medium.
    """
    learner = nn.ModuleList(sets)
    optimiser = torch.optim.AdamW(learner.parameters(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.0)
    first = _resume(folder / "checkpoint.safetensors", learner, optimiser)
    running: dict[str, float] = {}
    with tqdm(range(first, recipe.steps), initial=first, total=recipe.steps, desc="distilling", unit="step", mininterval=5) as bar:
        for step in bar:
            media = medium(step, {one.target.media for one in sets})
            for group in optimiser.param_groups:
                group["lr"] = recipe.rate * cosine(step, recipe.steps, 1.0, recipe.warmup, least=0.05)
            optimiser.zero_grad()
            for name, loss in _losses(vlm, lessons, [one for one in sets if one.target.media == media], recipe.seed, step).items():
                running[name] = loss if name not in running else 0.95 * running[name] + 0.05 * loss
            nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
            optimiser.step()
            bar.set_postfix({name: f"{loss:.3f}" for name, loss in running.items()}, refresh=False)
            last = step + 1 in (recipe.steps, first + (stop_after or recipe.steps))
            if last or (step + 1) % recipe.every == 0:
                _save(folder / "checkpoint.safetensors", step + 1, learner, optimiser)
                with (folder / "log.jsonl").open("a") as log:
                    log.write(json.dumps({"step": step + 1, **{name: round(loss, 4) for name, loss in running.items()}}) + "\n")
            if last:
                break


def medium(step: int, there: set[Media]) -> Media:
    """What a step is of."""
    wanted: Media = "clip" if step % 3 == 2 else "image"
    return wanted if wanted in there else next(iter(there))


def _losses(vlm: Mini, lessons: Lessons, sets: Sequence[Set], seed: int, step: int) -> dict[str, float]:
    """The mean KL of each set on the batch of a step; gradients are left with the parameters."""
    lesson = lessons.drawn(sets[0].target.media, seed, step)
    with torch.no_grad():
        teacher = read(vlm.decoder, lesson.batch, lesson.embeddings)
    losses = {}
    for one in sets:
        k = one.target.count
        batch = shorter(lesson.batch, lesson.embeddings.shape[1], k)
        coded = Braco().code(lesson.embeddings.float(), lesson.grid, k, one.trained())
        loss = divergence(vlm.decoder, teacher, read(vlm.decoder, batch, coded.tokens), batch).mean()
        loss.backward()
        losses[str(one.target)] = float(loss.detach())
    return losses


def _save(path: Path, step: int, learner: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    kept.save(path, {"sets": learner.state_dict()}, optimiser, {"step": str(step)})


def _resume(path: Path, learner: nn.Module, optimiser: torch.optim.Optimizer) -> int:
    """Load the checkpoint, if there is one; the step to go on with."""
    if not path.exists():
        return 0
    parts, facts = kept.resume(path, optimiser)
    learner.load_state_dict(parts["sets"])
    return int(facts["step"])
