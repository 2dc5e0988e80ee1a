"""What acting is made of: an observation, a chunk of actions, and the protocols of robots, policies and action heads.

Letters: h actions of a chunk, a numbers of an action, p numbers of a state (proprioception).

Freshness goes end to end by one value: the `Stamp` that an observation was taken with is the stamp of every action made from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import inf
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.pipeline import Context
from mmsdk.vision.types import Image
from mmsdk.vision.values import brief
from mmsdk.vla.contract import Contract

__all__ = ["ActionChunk", "ActionHead", "Effort", "Observation", "Policy", "Request", "Robot", "Stamp"]


@dataclass(frozen=True, slots=True)
class Stamp:
    """When an observation was taken and what was asked of it; actions carry the stamp of the observation they were made from.

    `captured` is the second, by the loop's clock, at which the oldest part of the observation was captured. `episode` counts resets: what
    was made in one episode is never executed in another. `request` numbers what the loop asked of the policy, from 1 (0: nothing was
    asked yet). `deadline` is the second after which the answer is dropped. `seed` makes the answer's noise reproducible whatever else
    the policy was asked in between.
    """

    captured: float
    episode: int = 0
    request: int = 0
    deadline: float = inf
    seed: int = 0

    def asked(self, request: int, deadline: float, seed: int = 0) -> "Stamp":
        """The same observation's stamp, now part of request number `request`."""
        return replace(self, request=request, deadline=deadline, seed=seed)


@dataclass(frozen=True, slots=True)
class Observation:
    """What the robot saw and felt: pictures by camera name, the state in the contract's order and units, and the instruction.

    `captured` gives the second at which each part was captured, by camera name and "state"; a part that is not named was captured at
    `stamp.captured`.
    """

    images: Mapping[str, Image]
    state: Float[Tensor, " p"]
    instruction: str
    stamp: Stamp
    captured: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        return brief(self)

    def age(self, part: str, now: float) -> float:
        """Seconds since a part ("state" or a camera's name) was captured; negative where the clock went back."""
        return now - self.captured.get(part, self.stamp.captured)


@dataclass(frozen=True, slots=True)
class ActionChunk:
    """h actions in the contract's order and units; the first is meant for the moment at which the observation was captured.

    `stamp` is the observation's, unchanged. `producer` names what made the chunk, for logs ("pi0", "fast path", ...).
    """

    actions: Float[Tensor, "h a"]
    stamp: Stamp
    producer: str = "policy"

    def __repr__(self) -> str:
        return brief(self)

    def __len__(self) -> int:
        return self.actions.shape[0]


class Effort(IntEnum):
    """How much work a policy may put into an answer. A policy that has no such part ignores the step; the loop goes down when late."""

    HOLD = 0
    FEWER_STEPS = 1
    REUSE_SLOW = 2
    SKIP_REFINE = 3
    FULL = 4


@dataclass(frozen=True, slots=True)
class Request:
    """What the loop asks of a policy: act on this observation, given what the robot will be doing meanwhile.

    `pending` are the actions already committed, the first being due at the observation; of them about `delay` will have been executed
    when the answer arrives (real-time chunking keeps those and blends into the others). No rows: nothing is committed. `due` names the
    parts of a policy whose turn it is: "vlm", "adapter", "expert"; a part that is not due re-uses what it last made. `noise` is what a
    policy that samples starts from, in its own width; no rows: it is drawn from the stamp's seed.
    """

    observation: Observation
    pending: Float[Tensor, "k a"]
    delay: int = 0
    effort: Effort = Effort.FULL
    due: frozenset[str] = frozenset({"vlm", "adapter", "expert"})
    noise: Float[Tensor, "n w"] = field(default_factory=lambda: torch.zeros(0, 0))

    def __repr__(self) -> str:
        return brief(self)


@runtime_checkable
class Policy(Protocol):
    """Decides what to do: one request in, one chunk out, with the stamp of the request's observation."""

    def reset(self, episode: int) -> None:
        """Forget everything that was seen: a new episode begins."""
        ...

    def __call__(self, request: Request) -> ActionChunk: ...


@runtime_checkable
class ActionHead(Protocol):
    """What the decoder knows, turned into actions: reads the context's cache through `fork()` and never writes into it.

    The context holds one row, the observation's. Noise comes from a `torch.Generator` seeded with `observation.stamp.seed`.
    """

    def __call__(self, context: Context, observation: Observation) -> ActionChunk: ...


@runtime_checkable
class Robot(Protocol):
    """A robot, real or simulated, in the units of its contract. Neither method may block: a driver keeps the newest of each part."""

    @property
    def contract(self) -> Contract:
        """What its pictures, state and actions mean, and the limits that the loop keeps."""
        ...

    def observe(self) -> Observation:
        """The newest observation; its stamp tells how old it is. Raises InputError where there is none that can be used."""
        ...

    def apply(self, action: Float[Tensor, " a"]) -> None:
        """Send one command; it holds until the next."""
        ...
