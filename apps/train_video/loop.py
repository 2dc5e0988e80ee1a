"""The training loop: seeded steps, averaged weights, checkpoints by the clock that a later run resumes from exactly; Ctrl-C saves."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from mmsdk.apps import kept
from mmsdk.apps.interrupts import Stop
from mmsdk.apps.train_video.learn import CONFIG, Recipe, begun, loss_of, memory, rate, stage_of
from mmsdk.diffusion.dit import DiT, DiTConfig
from mmsdk.diffusion.imagine import Imaginer, Screen
from mmsdk.diffusion.words import Words

__all__ = ["CHECKPOINT", "Learner", "Lesson", "train"]

CHECKPOINT = "checkpoint.safetensors"
_LOGGED = 25  # steps
Lesson = Callable[[DiT, Words, Recipe, int, torch.dtype], Tensor]
"""What a step teaches: its loss."""


@dataclass(slots=True)
class Learner:
    """The model and its words, the averages of both over the last steps, and the optimiser."""

    model: DiT
    words: Words
    average: dict[str, Tensor]
    optimiser: torch.optim.Optimizer

    @staticmethod
    def of(config: DiTConfig, recipe: Recipe) -> "Learner":
        model, words = begun(config, recipe.seed)
        parameters = [*model.parameters(), *words.parameters()]
        optimiser = torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        learner = Learner(model, words, {}, optimiser)
        learner.average = {name: value.clone() for name, value in learner.weights().items()}
        return learner

    def weights(self) -> dict[str, Tensor]:
        """All that is learned, by name."""
        parts: tuple[tuple[str, nn.Module], ...] = (("model", self.model), ("words", self.words))
        return {f"{part}.{name}": value.detach() for part, module in parts for name, value in module.state_dict().items()}

    def put(self, weights: dict[str, Tensor]) -> None:
        """Go on with these."""
        for part, module in (("model", self.model), ("words", self.words)):
            module.load_state_dict({k.removeprefix(f"{part}."): v for k, v in weights.items() if k.startswith(f"{part}.")})

    def step(self, recipe: Recipe, number: int, dtype: torch.dtype, lesson: Lesson = loss_of) -> float:
        """One step of training; the loss before it."""
        for group in self.optimiser.param_groups:
            group["lr"] = rate(recipe, number)
        loss = lesson(self.model, self.words, recipe, number, dtype)
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*self.model.parameters(), *self.words.parameters()], 1.0)
        self.optimiser.step()
        now = self.weights()
        torch._foreach_lerp_(list(self.average.values()), [now[name] for name in self.average], 1 - memory(recipe, number))
        return float(loss.detach())

    def save(self, folder: Path, step: int) -> None:
        """Everything a resumed run needs, written whole or not at all."""
        parts = {"model": self.model.state_dict(), "words": self.words.state_dict(), "average": self.average}
        kept.save(folder / CHECKPOINT, parts, self.optimiser, {"step": str(step)})

    def resume(self, folder: Path) -> int:
        """Load the checkpoint, if there is one; the step to go on with."""
        path = folder / CHECKPOINT
        if not path.exists():
            return 0
        parts, facts = kept.resume(path, self.optimiser)
        self.model.load_state_dict(parts["model"])
        self.words.load_state_dict(parts["words"])
        self.average = {name: parts["average"][name] for name in self.average}
        return int(facts["step"])

    def imaginer(self, recipe: Recipe) -> Imaginer:
        """What was learned, averaged, as it is used."""
        self.put(self.average)
        return Imaginer(self.model.eval().requires_grad_(False), self.words.requires_grad_(False), Screen(shift=recipe.shift))


def train(
    recipe: Recipe,
    folder: Path,
    dtype: torch.dtype,
    config: DiTConfig = CONFIG,
    every: float = 180.0,
    stop_after: int | None = None,
    compiled: bool = False,
    lesson: Lesson = loss_of,
) -> tuple[int, Learner]:
    """Train from the last checkpoint in `folder` to the end, or `stop_after` steps; a checkpoint every so many seconds and at the end.

    Gives the steps that were taken in all, and what was learned by a `lesson`, clips where none is named. The first Ctrl-C ends it after
    the step that is being made. `compiled` layers take two thirds of the time, and half a minute at each size first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    learner = Learner.of(config, recipe)
    first = done = learner.resume(folder)
    end = recipe.steps if stop_after is None else min(recipe.steps, first + stop_after)
    saved, begun_at, losses = time.monotonic(), time.monotonic(), list[float]()
    bar = tqdm(range(first, end), initial=first, total=recipe.steps, desc="training", unit="step", mininterval=10)
    with bar, _compiled(learner.model, compiled), Stop() as stopping:
        for step in bar:
            losses.append(learner.step(recipe, step, dtype, lesson))
            done = step + 1
            last = done == end or stopping.asked
            if last or done % _LOGGED == 0:
                told = {"step": done, "side": stage_of(recipe, step)[0].side, "loss": round(sum(losses) / len(losses), 5)}
                _log(folder, told | {"seconds": round(time.monotonic() - begun_at, 1)})
                bar.set_postfix(loss=told["loss"], refresh=False)
                losses.clear()
            if last or time.monotonic() - saved > every:
                learner.save(folder, done)
                saved = time.monotonic()
            if last:
                break
    return done, learner


def _log(folder: Path, told: dict[str, int | float]) -> None:
    with (folder / "log.jsonl").open("a") as log:
        log.write(json.dumps(told) + "\n")


@contextmanager
def _compiled(model: DiT, wanted: bool) -> Iterator[None]:
    """Within, layers run compiled, all as one: that they are numbered is no reason to compile each."""
    for block in model.blocks if wanted else ():
        block.compile(dynamic=False)
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        yield
