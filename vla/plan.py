"""Chunks as they are consumed: one action a tick, from the newest chunk or from the mean of all that speak of this tick.

A chunk's first action was meant for the tick at which its observation was captured. When it arrives, `skip` further actions have been
taken from the plan; the first `skip` of the chunk are past and are dropped. A chunk that is past altogether changes nothing, so that
merging never empties a plan.

Real-time chunking needs no plan of its own: the head sees `Request.pending`, keeps what is committed, and its chunk replaces the rest.
"""

from dataclasses import dataclass, field
from math import exp, inf
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vla.contract import Contract

__all__ = ["Plan", "RecedingHorizon", "TemporalEnsemble", "averaging"]


def averaging(contract: Contract) -> Bool[Tensor, " a"]:
    """Which numbers of an action may be averaged: not those of rotations and grippers."""
    return torch.tensor([command.averages for command, _, _ in contract.each_command()])


@runtime_checkable
class Plan(Protocol):
    """What is to be executed, tick by tick."""

    def merge(self, actions: Float[Tensor, "h a"], skip: int) -> bool:
        """Take a new chunk into account, `skip` actions late. False where it is past altogether and was not used."""
        ...

    def pop(self) -> Float[Tensor, " a"] | None:
        """The action of this tick, or none where the plan is at its end."""
        ...

    def pending(self) -> Float[Tensor, "k a"]:
        """The actions that are left, the next one first; no rows where there are none."""
        ...

    def clear(self) -> None:
        """Forget everything."""
        ...


@dataclass(slots=True)
class RecedingHorizon:
    """The newest chunk takes over where it begins to speak. `blend` is its share where the old one still speaks too: 1 replaces it.

    lerobot's queue blends .7 of the new into .3 of the old, or .5, or takes the latest only. At most `horizon` actions of a chunk are kept
    (0: all): what lies further ahead was foreseen from too far away. Where `averaged` is False the newest value stands unblended.
    """

    averaged: Bool[Tensor, " a"]
    blend: float = 1.0
    horizon: int = 0
    _left: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.blend <= 1 or self.horizon < 0:
            raise InputError(f"blend {self.blend} is in (0, 1], horizon {self.horizon} is 0 (all) or a number of actions", item="plan")
        self.clear()

    def merge(self, actions: Float[Tensor, "h a"], skip: int) -> bool:
        """See `Plan`."""
        new = (actions[: self.horizon] if self.horizon else actions)[skip:].double()
        if not new.shape[0]:
            return False
        both = min(new.shape[0], self._left.shape[0])
        mixed = torch.where(self.averaged, self.blend * new[:both] + (1 - self.blend) * self._left[:both], new[:both])
        self._left = torch.cat((mixed, new[both:]))
        return True

    def pop(self) -> Float[Tensor, " a"] | None:
        """See `Plan`."""
        if not self._left.shape[0]:
            return None
        action, self._left = self._left[0], self._left[1:]
        return action

    def pending(self) -> Float[Tensor, "k a"]:
        """See `Plan`."""
        return self._left

    def clear(self) -> None:
        """See `Plan`."""
        self._left = torch.zeros(0, self.averaged.shape[0], dtype=torch.float64)


@dataclass(slots=True)
class TemporalEnsemble:
    """The mean of every chunk that speaks of a tick, the i-th oldest weighted exp(-decay i) (ACT, arXiv 2304.13705; decay .01).

    Kept online: with S_n the sum of the first n weights, mean_n = (mean_{n-1} S_{n-1} + w_n a) / S_n. Where `averaged` is False the newest
    value stands, for the mean of two gripper states or quaternions is neither.
    """

    averaged: Bool[Tensor, " a"]
    decay: float = 0.01
    _left: Tensor = field(init=False, repr=False)
    _count: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.decay < inf:
            raise InputError(f"decay {self.decay} is a number from 0", item="plan")
        self.clear()

    def merge(self, actions: Float[Tensor, "h a"], skip: int) -> bool:
        """See `Plan`."""
        new = actions[skip:].double()
        if not new.shape[0]:
            return False
        both = min(new.shape[0], self._left.shape[0])
        before = self._weights(self._count[:both])
        weight = torch.exp(-self.decay * self._count[:both])
        mean = (self._left[:both] * before[:, None] + weight[:, None] * new[:both]) / (before + weight)[:, None]
        # a chunk may be shorter than what older ones still say
        self._left = torch.cat((torch.where(self.averaged, mean, new[:both]), self._left[both:], new[both:]))
        self._count = torch.cat((self._count[:both] + 1, self._count[both:], torch.ones(new.shape[0] - both, dtype=torch.float64)))
        return True

    def pop(self) -> Float[Tensor, " a"] | None:
        """See `Plan`."""
        if not self._left.shape[0]:
            return None
        action, self._left, self._count = self._left[0], self._left[1:], self._count[1:]
        return action

    def pending(self) -> Float[Tensor, "k a"]:
        """See `Plan`."""
        return self._left

    def clear(self) -> None:
        """See `Plan`."""
        self._left = torch.zeros(0, self.averaged.shape[0], dtype=torch.float64)
        self._count = torch.zeros(0, dtype=torch.float64)

    def _weights(self, count: Tensor) -> Tensor:
        """The sum of the weights of the `count` oldest."""
        ratio = exp(-self.decay)
        return (1 - ratio**count) / (1 - ratio) if ratio < 1 else count
