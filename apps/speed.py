"""How fast a machine is, asked of it for a second: how many bytes it reads of its memory, and how many operations its products take.

Decoding reads every weight once a token, so that memory sets its pace; reading a prompt is products of matrices. Both are measured with
torch's own threads, in rounds, of which the fastest counts. A machine that does something else all the time looks slower than it is, so
that its load belongs beside the numbers.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

__all__ = ["BYTES", "Speed", "load", "measured"]

ROUNDS = 3  # in which all things are measured, one after the other: a short disturbance spoils one of them
SECONDS = 0.07  # each thing is repeated in a round for so long
READ = 2**26  # numbers in float32 that are read: 256 MB, more than caches hold
SIDE = 1024  # of the matrices that are multiplied

BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.625}
"""Bytes that a weight takes, in int4 with the scales of its group."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes read in a second, and operations (a multiplication and an addition are two) in a second by the name of the number format."""

    memory: float
    products: dict[str, float]

    def tokens(self, weights: float) -> float:
        """Tokens a second that a model of so many bytes says at most, one question alone: each token reads all of it."""
        return self.memory / weights


def measured(device: torch.device) -> Speed:
    """Measure a device, in about a second, of which each thing has its fastest moment."""
    wait = torch.cuda.synchronize if device.type == "cuda" else _nothing
    numbers = torch.ones(READ, device=device)
    works: dict[str, Callable[[], object]] = {"memory": numbers.sum}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.full((SIDE, SIDE), 1 / SIDE, device=device, dtype=dtype)
        works[str(dtype).removeprefix("torch.")] = partial(torch.mm, matrix, matrix, out=torch.empty_like(matrix))
    rounds = [{name: _fastest(work, wait) for name, work in works.items()} for _ in range(ROUNDS)]
    best = {name: min(one[name] for one in rounds) for name in works}
    return Speed(4 * READ / best.pop("memory"), {name: 2 * SIDE**3 / seconds for name, seconds in best.items()})


def load() -> float:
    """How many programs ran, or waited for a core, at one time during the last minute; 0 where the system does not count them."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return 0.0


def _fastest(work: Callable[[], object], wait: Callable[[], None]) -> float:
    """Seconds of the fastest of several runs, after one that counts for nothing."""
    work()
    wait()
    begun, best = perf_counter(), math.inf
    while True:
        started = perf_counter()
        work()
        wait()
        ended = perf_counter()
        best = min(best, ended - started)
        if ended - begun >= SECONDS:
            return best


def _nothing() -> None:
    """What there is to wait for on a processor."""
