"""Walks in rooms that training never drew, with the backbone's own STOP and with the verifier's."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.apps.console import Cell
from mmsdk.apps.intervals import wilson
from mmsdk.apps.train_stop.walker import Walker, read, verifier
from mmsdk.errors import InputError
from mmsdk.vla.envs.rooms import LIMIT, Walkers, draw
from mmsdk.vla.heads.latte import STOP
from mmsdk.vla.latency import percentiles
from mmsdk.vla.stop import StopRule, Terminator

__all__ = ["SHIPPED", "Decide", "Outcome", "rows", "trial"]

SHIPPED = Path(__file__).parent
# (hidden state, proposed action, best action that is not STOP) -> the action that is taken
Decide = Callable[[Tensor, Tensor, Tensor], Tensor]
_HELD_OUT = 900_000_011


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row: the share of walks that stopped a metre from the pillar that was told, with its 95 % interval.

    `false_stop` is the share of walks that stopped elsewhere, `missed_stop` of those that came by but did not stop there, `oracle` of
    those that came by at all. Latency is that of one step of one walker.
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
    oracle: float
    false_stop: float
    missed_stop: float


def rows(episodes: int = 100, folder: Path = SHIPPED) -> Iterator[dict[str, Cell]]:
    """The rows of the suite "navigation": conditions "backbone" and "verified". Raises InputError where nothing trained is there."""
    walker = Walker()
    read(folder / "walker.safetensors", walker)
    head = verifier()
    facts = read(folder / "verifier.safetensors", head)
    rule = StopRule(float(facts["accept"]), float(facts["force"]), limit=LIMIT)
    yield asdict(trial(walker, lambda: _as_proposed, "backbone", episodes))
    yield asdict(trial(walker, lambda: Terminator(head, rule), "verified", episodes))


@torch.no_grad()
def trial(walker: Walker, begin: Callable[[], Decide], condition: str, episodes: int) -> Outcome:
    """Walk in so many held-out rooms at a time; then in one alone, for the latency. `begin` gives what decides, for new walks.

    Raises InputError for no rooms.
    """
    if episodes < 1:
        raise InputError(f"it is {episodes}, expected at least 1", item="episodes")
    stopped, near, came, _ = _walk(walker, begin(), episodes, _HELD_OUT)
    seconds = _walk(walker, begin(), 1, _HELD_OUT + 1)[3]
    latency = percentiles([1000 * each for each in seconds[1:]])
    right = int((stopped & near).sum())
    low, high = wilson(right, episodes)
    return Outcome(
        "navigation", "stop a metre from the pillar of a colour", condition, right / episodes, episodes, low, high,
        latency.p50, latency.p95, 0,
        float(came.float().mean()), float((stopped & ~near).float().mean()), float((came & ~(stopped & near)).float().mean()),
    )  # fmt: skip


def _as_proposed(hidden: Float[Tensor, "n d"], proposed: Int[Tensor, " n"], other: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """The backbone's own policy."""
    return proposed


def _walk(walker: Walker, decide: Decide, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor, list[float]]:
    """Who stopped before the time was up, who is near then, who ever was, and the seconds of each step.

    What the limit ends is no STOP of the walker's.
    """
    walkers, seconds = Walkers(draw(count, torch.Generator().manual_seed(seed))), list[float]()
    came = walkers.near.clone()
    for _ in range(LIMIT - 1):
        pixels = walkers.look()
        began = time.perf_counter()
        hidden, logits = walker(pixels, walkers.rooms.goal)
        proposed, other = walker.proposes(logits)
        action = decide(hidden, proposed, other)
        seconds.append(time.perf_counter() - began)
        walkers.apply(torch.where(walkers.stopped, STOP, action))
        came |= walkers.near
    return walkers.stopped, walkers.near, came, seconds
