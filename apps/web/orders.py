"""What the demo's simulation is told and tells (`mmsdk.apps.web.arm`, `mmsdk.apps.web.arena`): values that two processes know."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8

__all__ = ["HORIZON", "LIMIT", "Planned", "Seen"]

HORIZON = 24  # actions of a plan beyond what was done already
LIMIT = 400  # steps of an episode; Meta-World's own end is at 500, and a plan looks ahead


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of an order: the page's picture, what the policy's cameras see (none where nothing is due), the hand in metres and how far
    the fingers are open, when, and where the episode stands."""

    pixels: UInt8[np.ndarray, "h w 3"]
    views: UInt8[np.ndarray, "c 3 a a"] | None
    hand: Float[np.ndarray, "4"]
    captured: float
    episode: int
    step: int
    done: bool
    over: bool


@dataclass(frozen=True, slots=True)
class Planned:
    """Actions in the simulation's own numbers, from -1 to 1: those done since a step, and those that the expert would do.

    `number` is that of the order which they answer.
    """

    actions: Float[np.ndarray, "h 4"]
    number: int
