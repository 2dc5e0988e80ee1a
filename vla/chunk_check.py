"""A whole chunk against its contract, before a single action of it is executed: what is wrong with it, from which step on."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import SafetyError
from mmsdk.vla.contract import Command, Contract
from mmsdk.vla.equivalent import in_range, nearest, no_rotation

__all__ = ["LONGEST", "OnViolation", "Violation", "check_chunk", "kept", "readable"]

OnViolation = Literal["clamp", "truncate", "refuse"]
LONGEST = 4096
"""Actions of a chunk; looking at more of them takes longer than ticks do."""
_SLACK = 1e-6
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Violation:
    """The first step (from 0) at which one number of the actions breaks one limit, by how much."""

    step: int
    name: str
    limit: str
    value: float
    allowed: float

    def __str__(self) -> str:
        return f"step {self.step}: {self.name} has {self.limit} {self.value:.4g}, allowed {self.allowed:.4g}"


def readable(actions: object) -> bool:
    """Whether actions are a plain tensor of floating-point numbers; a policy may hand out whatever it likes."""
    if not isinstance(actions, Tensor) or actions.is_meta or actions.is_nested:
        return False
    return actions.layout == torch.strided and actions.dtype in _FLOATS


def check_chunk(contract: Contract, actions: Float[Tensor, "h a"], before: Float[Tensor, "k b"]) -> tuple[Violation, ...]:
    """Every limit that the actions break, earliest first. `before` are the last commands sent, newest last: the seam is checked too.

    Range, speed, acceleration and jerk, from differences between commands at the contract's rate; rotations under the name nearest to the
    command before. Raises SafetyError for a wrong number of numbers, no actions or more than `LONGEST`, what is not finite, and what is no
    rotation: such a chunk is of no use at all.
    """
    _check_usable(contract, actions)
    values, tracks = _spelt(contract, actions.double(), before.double())
    found: list[Violation] = []
    for command, place, column in contract.each_command():
        feature, name = command.feature, f"{command.feature.name}[{place}]"
        found += _beyond(name, "value", values[:, column], feature.low[place], feature.high[place])
        found += _too_fast(name, command, tracks[:, column], len(actions), contract.rate)
    return tuple(sorted(found, key=lambda violation: violation.step))


def _check_usable(contract: Contract, actions: Tensor) -> None:
    if actions.ndim != 2:
        raise SafetyError(f"a chunk of shape {tuple(actions.shape)}; expected actions x {contract.action_size} numbers")
    if actions.shape[0] == 0 or actions.shape[1] != contract.action_size:
        told = f"a chunk of {actions.shape[0]} actions of {actions.shape[1]} numbers"
        raise SafetyError(f"{told}; {contract.name} takes {contract.action_size} numbers, and none is made up")
    if actions.shape[0] > LONGEST:
        raise SafetyError(f"a chunk of {actions.shape[0]} actions; at most {LONGEST} are taken")
    if not bool(actions.isfinite().all()):
        step, column = (int(place) for place in (~actions.isfinite()).nonzero()[0])
        raise SafetyError(f"a chunk that is not finite, first at step {step}, number {column}")
    for command in contract.action:
        rows = actions[:, contract.action_columns(command.feature.name)].double().tolist() if command.turns else []
        for step, row in enumerate(rows):
            if told := no_rotation(command.feature, row):
                raise SafetyError(f"a chunk that is no rotation, first at step {step}: {told}")


def _spelt(contract: Contract, actions: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The actions as they would be sent, and the track of all commands, each rotation under the name nearest to the one before it."""
    values, track = actions.clone(), torch.cat((before, actions))
    for command in contract.action:
        if command.turns:
            feature, columns = command.feature, contract.action_columns(command.feature.name)
            rows: list[list[float]] = track[:, columns].tolist()
            for step in range(1, len(rows)):
                rows[step] = nearest(feature, rows[step], rows[step - 1])
            track[:, columns] = track.new_tensor(rows)
            values[:, columns] = values.new_tensor([in_range(feature, row) for row in rows[len(before) :]])
    return values, track


def _too_fast(name: str, command: Command, track: Tensor, count: int, rate: float) -> list[Violation]:
    """Speed, acceleration and jerk of one number, whose last `count` values are the chunk's."""
    limits = {"speed": command.speed, "acceleration": command.acceleration, "jerk": command.jerk}
    found: list[Violation] = []
    if command.control == "effort":
        limits = {"speed": command.speed}
    elif command.moves:
        # what is commanded is the speed already, or as much of it as fits in a tick
        track = track * rate if command.meaning == "step" else track
        del limits["speed"]
        found += _beyond(name, "speed", track[len(track) - count :], -command.speed, command.speed)
    for limit, allowed in limits.items():
        track = track.diff() * rate
        # at the front are differences between what was sent before, and none at all where little was
        shown = track[-count:]
        found += _beyond(name, limit, shown, -allowed, allowed, count - shown.shape[0])
    return found


def kept(actions: Float[Tensor, "h a"], violations: Sequence[Violation], policy: OnViolation) -> Float[Tensor, "k a"]:
    """The actions that go on to the gate: all, for it to clamp; those before the first violation; or, if there is one, none."""
    if policy == "clamp" or not violations:
        return actions
    return actions[: violations[0].step if policy == "truncate" else 0]


def _beyond(name: str, limit: str, values: Tensor, low: float, high: float, offset: int = 0) -> list[Violation]:
    slack = _SLACK * max([1.0, *(abs(end) for end in (low, high) if isfinite(end))])
    outside = ((values < low - slack) | (values > high + slack)).nonzero()
    if not outside.numel():
        return []
    step = int(outside[0, 0])
    value = float(values[step])
    return [Violation(step + offset, name, limit, value, high if value > high else low)]
