"""The training loop: seeded steps, averaged weights, checkpoints by the clock that a later run resumes from exactly; Ctrl-C saves."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from mmsdk.apps.train_video.learn import CONFIG, Recipe, begun, loss_of, rate, stage_of
from mmsdk.diffusion.dit import DiT, DiTConfig
from mmsdk.diffusion.imagine import Imaginer, Screen
from mmsdk.diffusion.words import Words

__all__ = ["CHECKPOINT", "Learner", "Lesson", "Stop", "put_state", "state_of", "train", "written"]

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
        memory = min(recipe.memory, (1 + number) / (10 + number))
        torch._foreach_lerp_(list(self.average.values()), [now[name] for name in self.average], 1 - memory)
        return float(loss.detach())

    def save(self, folder: Path, step: int) -> None:
        """Everything a resumed run needs, written whole or not at all."""
        tensors = self.weights() | {f"average.{name}": value for name, value in self.average.items()}
        written(folder / CHECKPOINT, tensors | state_of(self.optimiser), step)

    def resume(self, folder: Path) -> int:
        """Load the checkpoint, if there is one; the step to go on with."""
        path = folder / CHECKPOINT
        if not path.exists():
            return 0
        tensors = load_file(path)
        self.put(tensors)
        self.average = {name: tensors[f"average.{name}"] for name in self.average}
        put_state(self.optimiser, tensors)
        return int(tensors["step"])

    def imaginer(self, recipe: Recipe) -> Imaginer:
        """What was learned, averaged, as it is used."""
        self.put(self.average)
        return Imaginer(self.model.eval().requires_grad_(False), self.words.requires_grad_(False), Screen(shift=recipe.shift))


def state_of(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What an optimiser remembers, as tensors by name."""
    states = optimiser.state_dict()["state"].items()
    return {f"optimiser.{index}.{name}": value for index, state in states for name, value in state.items()}


def put_state(optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Let it remember what `state_of` gave; other tensors are passed over."""
    state = optimiser.state_dict()
    state["state"] = {}
    for key, value in tensors.items():
        if key.startswith("optimiser."):
            _, index, name = key.split(".")
            state["state"].setdefault(int(index), {})[name] = value
    optimiser.load_state_dict(state)


def written(path: Path, tensors: Mapping[str, Tensor], step: int) -> None:
    """Write a checkpoint of a step, whole or not at all."""
    part = path.with_suffix(".part")
    save_file({name: value.contiguous() for name, value in {**tensors, "step": torch.tensor(step)}.items()}, part)
    os.replace(part, path)


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


class Stop:
    """Within, the first Ctrl-C is a wish to stop after this step; after it, and outside, Ctrl-C is what it was."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> "Stop":
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, *_: object) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, self._before)
