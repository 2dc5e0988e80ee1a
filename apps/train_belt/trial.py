"""Closed loop in simulations that training never drew: how many things are picked, how the others end, and how long a decision takes.

Run as a program, in a process of its own and off screen: `python -m mmsdk.apps.train_belt.trial FOLDER SUITE EPISODES CONDITION ...` prints
a row for each condition, as JSON; `mmsdk.apps.train_belt.rows` runs it.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file

from mmsdk.apps.intervals import wilson
from mmsdk.apps.train_belt.eyes import Eyes
from mmsdk.apps.train_belt.rows import Suite
from mmsdk.apps.train_belt.student import Recipe, Student, words
from mmsdk.vla.envs.belt import CHUNK, LIMIT, PERIOD
from mmsdk.vla.envs.fetch_belt import FetchBelts, Stage, draw
from mmsdk.vla.envs.fetch_scene import View
from mmsdk.vla.envs.fetch_sizes import ACTION
from mmsdk.vla.heads.flow import euler
from mmsdk.vla.latency import percentiles
from mmsdk.vla.memory.dual import Ablation, DualMemory, Turn
from mmsdk.vla.memory.scores import Tally

__all__ = ["Actor", "Score", "main", "trial"]

_HELD_OUT = 900_000_007


@dataclass(frozen=True, slots=True)
class Score:
    """One row of the result: the share of episodes in which the right thing was lifted, with its 95 % interval.

    `unsafe` counts the episodes in which the hand stood in the way of a thing that the belt carries; they are failures. Latency is that of
    one decision of one robot, from the picture to the chunk.
    """

    suite: str
    task: str
    condition: str
    success: float
    n: int
    ci_low: float
    ci_high: float
    latency_p50_ms: float
    latency_p95_ms: float
    unsafe: int
    wrong: int
    missed: int


@dataclass(frozen=True, slots=True)
class Actor:
    """A trained policy."""

    eyes: Eyes
    student: Student
    recipe: Recipe

    @staticmethod
    def of(folder: Path, condition: Ablation) -> "Actor":
        """That of a folder with what training exported."""
        path, recipe = folder / f"{condition}.safetensors", Recipe(condition)
        student = Student(recipe)
        student.load_state_dict({name: tensor.float() for name, tensor in load_file(path).items()})
        return Actor(Eyes.of(folder / "eyes.safetensors"), student.eval(), recipe)


@torch.no_grad()
def trial(stage: Stage, view: View, actor: Actor, suite: Suite, episodes: int) -> Score:
    """Act in so many held-out episodes, all at a time; then in four alone, one after the other, for the latency."""
    ends = Counter(_act(stage, view, actor, suite, episodes, seed=_HELD_OUT)[0])
    taken = [1000 * seconds for seed in range(1, 5) for seconds in _act(stage, view, actor, suite, 1, seed=_HELD_OUT + seed)[1][1:]]
    low, high = wilson(ends["picked"], episodes)
    latency = percentiles(taken)
    return Score(
        suite, "pick what comes by" if suite == "moving-belt" else "pick the one that was shown", actor.recipe.condition,
        ends["picked"] / episodes, episodes, low, high, latency.p50, latency.p95, ends["stalled"], ends["wrong"], ends["missed"] + ends[""],
    )  # fmt: skip


def _act(stage: Stage, view: View, actor: Actor, suite: Suite, count: int, seed: int) -> tuple[list[str], list[float]]:
    """How the episodes ended, and the seconds that each decision took."""
    generator, student = torch.Generator().manual_seed(seed), actor.student
    belts = FetchBelts(stage, draw(torch.full((count,), suite == "cue"), generator))
    memory, seconds = DualMemory(student.decoder, student.refiner, actor.recipe.memory), list[float]()
    for step in range(0, LIMIT, CHUNK):
        noise = torch.randn(count, CHUNK, ACTION, generator=generator)
        pictures, felt = belts.pictures(view), student.felt(belts.state())
        began, tally = time.perf_counter(), Tally()
        turn = _turn(actor, memory, pictures, belts.episodes.cued, step)
        actions = student.commands(euler(student.expert.watched(turn.context, felt, tally), noise, actor.recipe.flow))
        memory.close(turn, tally)
        seconds.append(time.perf_counter() - began)
        for action in actions.unbind(1):
            belts.apply(action)
        if not bool(belts.running.any()):
            break
    return belts.outcome, seconds


def _turn(actor: Actor, memory: DualMemory, pictures: torch.Tensor, cued: torch.Tensor, step: int) -> Turn:
    if step % PERIOD and not memory.config.refine:
        return memory.again()
    sight, present = actor.student.places(actor.eyes.features(pictures)), torch.ones(len(cued), 1, dtype=torch.bool)
    if step % PERIOD:
        return memory.fast(float(step), sight, present)
    return memory.slow(float(step), sight, present, *words(cued))


def main(given: Sequence[str]) -> None:
    """Print the rows."""
    folder, suite, episodes, *conditions = given
    torch.set_num_threads(1)
    stage = Stage.made()
    view = View(stage.model)
    for condition in conditions:
        actor = Actor.of(Path(folder), cast(Ablation, condition))
        print(json.dumps(asdict(trial(stage, view, actor, cast(Suite, suite), int(episodes)))), flush=True)
    view.close()


if __name__ == "__main__":
    main(sys.argv[1:])
