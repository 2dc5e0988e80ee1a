"""The training loop: seeded steps over pictures and clips in turn, and checkpoints that a later run resumes from exactly."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from mmsdk.apps import kept
from mmsdk.apps.descent import cosine
from mmsdk.apps.train_braco.distil import Lesson, Lessons, divergence, read, read_beside, shorter
from mmsdk.apps.train_braco.sets import Media, Set
from mmsdk.apps.train_mini.finetune import layer_forward
from mmsdk.models.mini.family import Mini
from mmsdk.tokencomp.methods.braco import Braco

__all__ = ["Recipe", "Teacher", "learn"]

Layer = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The knobs; the same values and seed give the same batches. Every third step is of clips, where there are any.

    After `lessons` steps the same batches come again: what the model says that reads everything is then known, and that is more than a
    third of a step.
    """

    steps: int = 1200
    lessons: int = 600
    rate: float = 3e-3
    warmup: int = 10
    every: int = 25
    seed: int = 0


def learn(
    vlm: Mini, lessons: Lessons, sets: Sequence[Set], recipe: Recipe, folder: Path, layer: Layer = layer_forward,
    stop_after: int | None = None,
) -> None:  # fmt: skip
    """Train the sets in place, from the last checkpoint in `folder` to the end (or `stop_after` steps); Ctrl-C loses at most `every` steps.

    A step draws one batch, has it read in full where that is not known yet, and teaches every set of its medium. Gradients are clipped
    set by set, so that the budget that is furthest from the model does not slow the others down.
    """
    learner, teacher = nn.ModuleList(sets), Teacher(vlm, lessons, recipe)
    optimiser = torch.optim.AdamW(learner.parameters(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.0)
    first = _resume(folder / "checkpoint.safetensors", learner, optimiser)
    running: dict[str, float] = {}
    with tqdm(range(first, recipe.steps), initial=first, total=recipe.steps, desc="distilling", unit="step", mininterval=5) as bar:
        for step in bar:
            media = medium(step, {one.target.media for one in sets})
            for group in optimiser.param_groups:
                group["lr"] = recipe.rate * cosine(step, recipe.steps, 1.0, recipe.warmup, least=0.05)
            optimiser.zero_grad()
            taught = [one for one in sets if one.target.media == media]
            for name, loss in _losses(vlm, *teacher(media, step), taught, layer).items():
                running[name] = loss if name not in running else 0.95 * running[name] + 0.05 * loss
            for one in taught:
                nn.utils.clip_grad_norm_(one.parameters(), 1.0)
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


class Teacher:
    """The model that reads everything, and what it said of each batch so far."""

    def __init__(self, vlm: Mini, lessons: Lessons, recipe: Recipe) -> None:
        self._vlm, self._lessons, self._recipe = vlm, lessons, recipe
        self._said: dict[tuple[Media, int], Float[Tensor, "a d"]] = {}

    @torch.no_grad()
    def __call__(self, media: Media, step: int) -> tuple[Lesson, Float[Tensor, "a d"]]:
        """The batch of a step, and the final hidden states at its answers."""
        number = step % self._recipe.lessons
        lesson = self._lessons.drawn(media, self._recipe.seed, number)
        if (media, number) not in self._said:
            self._said[media, number] = read(self._vlm.decoder, lesson.batch, lesson.embeddings)
        return lesson, self._said[media, number]


def _losses(vlm: Mini, lesson: Lesson, said: Float[Tensor, "a d"], sets: Sequence[Set], layer: Layer) -> dict[str, float]:
    """The mean KL of each set on a batch; gradients are left with the parameters."""
    n = lesson.embeddings.shape[1]
    batches = [shorter(lesson.batch, n, one.target.count) for one in sets]
    x = lesson.embeddings.float()
    coded = [Braco().code(x, lesson.grid, one.target.count, one.trained()).tokens for one in sets]
    pupils = read_beside(vlm.decoder, batches, coded, layer)
    losses = [divergence(vlm.decoder, said, pupil, lesson.batch).mean() for pupil in pupils]
    torch.stack(losses).sum().backward()
    return {str(one.target): float(loss.detach()) for one, loss in zip(sets, losses, strict=True)}


def _save(path: Path, step: int, learner: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    kept.save(path, {"sets": learner.state_dict()}, optimiser, {"step": str(step)})


def _resume(path: Path, learner: nn.Module, optimiser: torch.optim.Optimizer) -> int:
    """Load the checkpoint, if there is one; the step to go on with."""
    if not path.exists():
        return 0
    parts, facts = kept.resume(path, optimiser)
    learner.load_state_dict(parts["sets"])
    return int(facts["step"])
