"""What the simulation of Meta-World tells (`mmsdk.vla.envs.metaworld`, `mmsdk.vla.envs.metaworld_stage`): values that two processes know.

Nothing here imports torch: beside it, where it comes later, OSMesa ends the simulation's process.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8

__all__ = ["SIDE", "Seen"]

SIDE = 112
"""Pixels of a picture's sides: eight patches of the default encoder."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of an order: the hand in metres and how far the fingers are open, whether the task is or was done, how many steps it has
    taken; pictures by camera, or none where none were due."""

    hand: Float[np.ndarray, "4"]
    done: bool
    step: int
    pictures: UInt8[np.ndarray, "c 3 h w"] | None
