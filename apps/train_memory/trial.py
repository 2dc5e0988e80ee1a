"""Closed loop on episodes that training never drew: how many are picked, how the others end, and how long a decision takes."""

import time
from collections import Counter
from dataclasses import dataclass

import torch

from mmsdk.apps.intervals import wilson
from mmsdk.apps.train_memory.lessons import shown, words
from mmsdk.apps.train_memory.student import Recipe, Student
from mmsdk.vla.envs.belt import ACTION, CHUNK, LIMIT, PERIOD, Hands, draw
from mmsdk.vla.heads.flow import euler
from mmsdk.vla.latency import percentiles
from mmsdk.vla.memory.dual import DualMemory, Turn
from mmsdk.vla.memory.scores import Tally

__all__ = ["Score", "trial", "wilson"]

_HELD_OUT = 900_000_007


@dataclass(frozen=True, slots=True)
class Score:
    """One row of the result: the share of episodes in which the right thing was picked, with its 95 % interval.

    `stalled` counts hands that stood in a thing's way, which is what is not safe here. Latency is that of one decision of one robot.
    """

    suite: str
    task: str
    condition: str
    success: float
    n: int
    ci_low: float
    ci_high: float
    stalled: int
    wrong: int
    missed: int
    latency_p50_ms: float
    latency_p95_ms: float


@torch.no_grad()
def trial(student: Student, recipe: Recipe, task: str, episodes: int) -> Score:
    """Act in so many held-out episodes of "belt" or "cue", all at a time; then in one alone, for the latency."""
    ends = Counter(_act(student, recipe, task, episodes, seed=_HELD_OUT)[0])
    # the first period warms up
    alone = _act(student, recipe, task, 1, seed=_HELD_OUT + 1)[1][PERIOD // CHUNK :]
    taken = percentiles([1000 * seconds for seconds in alone])
    picked = ends["picked"]
    low, high = wilson(picked, episodes)
    return Score(
        "moving-belt" if task == "belt" else "cue",
        task,
        recipe.condition,
        picked / episodes,
        episodes,
        low,
        high,
        ends["stalled"],
        ends["wrong"],
        ends["missed"] + ends[""],
        taken.p50,
        taken.p95,
    )


def _act(student: Student, recipe: Recipe, task: str, rows: int, seed: int) -> tuple[list[str], list[float]]:
    """How the episodes ended, and the seconds that each decision took."""
    generator = torch.Generator().manual_seed(seed)
    tasks = torch.full((rows,), task == "cue")
    hands, memory, seconds = Hands(draw(tasks, generator)), DualMemory(student.decoder, student.refiner, recipe.memory), list[float]()
    for step in range(0, LIMIT, CHUNK):
        noise = torch.randn(rows, CHUNK, ACTION, generator=generator)
        began, tally = time.perf_counter(), Tally()
        turn = _turn(student, memory, hands, tasks, step)
        actions = euler(student.expert.watched(turn.context, hands.state(), tally), noise, recipe.flow)
        memory.close(turn, tally)
        seconds.append(time.perf_counter() - began)
        for action in actions.unbind(1):
            hands.apply(action)
    return hands.outcome, seconds


def _turn(student: Student, memory: DualMemory, hands: Hands, tasks: torch.Tensor, step: int) -> Turn:
    if step % PERIOD and not memory.config.refine:
        return memory.again()
    sight, present = shown(student.eyes, hands.episodes, step), torch.ones(len(tasks), 1, dtype=torch.bool)
    now = float(step)
    return memory.fast(now, sight, present) if step % PERIOD else memory.slow(now, sight, present, *words(tasks))
