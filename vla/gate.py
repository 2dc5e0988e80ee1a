"""The gate: whatever is wanted, what reaches the robot keeps to its contract, and can still be brought to rest inside of it.

Each number of an action is one axis (`mmsdk.vla.motion`): of a position the command itself, of a velocity or a step the motion that it
adds up to, corrected by what the robot measures and kept `lag` away from the ends of its range. Where a workspace is declared, the whole
way to rest is checked in it, tool point by tool point. Limits of a rotation act on its numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import ModelError, SafetyError
from mmsdk.vla.contract import Command, Contract
from mmsdk.vla.motion import Axis, Motion

__all__ = ["Forward", "Gate", "Verdict"]

Forward = Callable[[Float[Tensor, "n a"]], Float[Tensor, "n 3"]]
"""Forward kinematics: axis positions, in the action's order, to the tool's position in metres of the robot's base."""

Kind = Literal["position", "velocity", "step", "effort"]
_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Verdict:
    """What may be sent, and what was changed in what was wanted ("joints[2]: 1.7 became 1.52"); nothing changed, nothing named."""

    command: Float[Tensor, " a"]
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Lane:
    """One number of the action: its name, what it commands, its limits, and its column in the state (-1: nothing measures it)."""

    name: str
    kind: Kind
    axis: Axis
    low: float
    high: float
    measured: int
    lag: float


class Gate:
    """Keeps the last command of every axis and its motion. Nothing passes before `start` has said where the robot stands."""

    def __init__(self, contract: Contract, forward: Forward | None = None) -> None:
        """Raises ModelError for a workspace without forward kinematics, and for actions that are relative to what a policy saw."""
        if contract.workspace.bounded and forward is None:
            raise ModelError(f"{contract.name}: a workspace is declared; pass the robot's forward kinematics, without which it is not kept")
        for command in contract.action:
            if command.meaning == "relative":
                raise ModelError(
                    f"{contract.name}: {command.feature.name} is relative to what a policy saw; no robot takes that: convert it"
                )
        self.contract = contract
        self.started = self._commanded = False
        self._forward = forward
        self._period = 1.0 / contract.rate
        self._lanes = [_lane(contract, command, place) for command, place, _ in contract.each_command()]
        self._motions = [Motion(0.0)] * len(self._lanes)
        self._before = self._motions
        self._aims = [0.0] * len(self._lanes)
        self._rest: list[float] | None = None

    def start(self, state: Float[Tensor, " p"]) -> None:
        """Begin, or begin again, at rest where the robot is measured.

        A position that was commanded before stays where it differs by less than an axis moves in a tick, so that it does not jump by what
        the robot is still behind.
        """
        values = state.tolist()
        for index, (lane, before) in enumerate(zip(self._lanes, self._motions, strict=True)):
            place = values[lane.measured] if lane.measured >= 0 else 0.0
            near = min(lane.lag, lane.axis.speed * self._period)
            keeps = self._commanded and lane.kind == "position" and abs(place - before.position) <= near < inf
            self._motions[index] = Motion(before.position if keeps else place)
        self._before, self._rest, self.started = list(self._motions), None, True
        self._aims = [motion.position for motion in self._motions]

    def agree(self, states: Sequence[Float[Tensor, " p"]]) -> bool:
        """Whether states measured one after the other can be of one robot: no number moved faster than its axis can, or than its lag.

        A single damaged measurement must not become the place that a robot is then sent to.
        """
        spread = (torch.stack(list(states)).amax(0) - torch.stack(list(states)).amin(0)).tolist()
        measured = [lane for lane in self._lanes if lane.measured >= 0]
        return all(spread[lane.measured] <= min(lane.lag, lane.axis.speed * self._period * len(states)) for lane in measured)

    def measure(self, state: Float[Tensor, " p"]) -> str:
        """Take in a new state; where it lies further than `lag` from what was commanded, say so and take in nothing."""
        values = state.tolist()
        for lane, motion in zip(self._lanes, self._motions, strict=True):
            if lane.measured >= 0 and not abs(values[lane.measured] - motion.position) <= lane.lag:
                return f"{lane.name}: measured {values[lane.measured]:.4g}, commanded {motion.position:.4g}, allowed lag {lane.lag:.4g}"
        for index, lane in enumerate(self._lanes):
            if lane.measured >= 0 and lane.kind in ("velocity", "step"):
                self._motions[index] = self._motions[index]._replace(position=values[lane.measured])
        return ""

    def towards(self, action: Float[Tensor, " a"]) -> Verdict:
        """One tick towards an action. Raises SafetyError for a wrong number of numbers, one that is not finite, and before `start`."""
        self._check(action)
        wanted = action.tolist()
        drifts = [(value - aim) / self._period for value, aim in zip(wanted, self._aims, strict=True)]
        told = self._settle([_next(*each) for each in zip(self._lanes, self._motions, wanted, drifts, strict=True)])
        self._rest, self._aims = None, wanted
        sent = self._sent()
        pairs = zip(self._lanes, wanted, sent, strict=True)
        changes = [f"{lane.name}: {value:.4g} became {now:.4g}" for lane, value, now in pairs if abs(value - now) > _SAME]
        return Verdict(torch.tensor(sent, dtype=torch.float64), (*told, *changes))

    def stop(self, state: Float[Tensor, " p"] | None = None) -> Verdict:
        """One tick of coming to rest: positions hold, velocities and efforts go to zero.

        Positions hold where `state`, which is to be fresh, measured them when the stop began; without it, where braking ends. Raises
        SafetyError before `start`.
        """
        if not self.started:
            raise SafetyError("there is no measured position to hold yet")
        if self._rest is None:
            self._rest = self._resting(state)
        self._settle([_stopping(*each) for each in zip(self._lanes, self._motions, self._rest, strict=True)])
        self._aims = [motion.position for motion in self._motions]
        return Verdict(torch.tensor(self._sent(), dtype=torch.float64))

    def jerks(self) -> list[float]:
        """The jerk of every axis from the last command but one to the last, in its unit per s^3."""
        pairs = zip(self._before, self._motions, strict=True)
        return [(after.acceleration - before.acceleration) / self._period for before, after in pairs]

    @property
    def resting(self) -> bool:
        """Whether every axis stands still, by what was commanded; an effort does so only at 0, for a constant one still pushes."""
        still = all(not motion.velocity and not motion.acceleration for motion in self._motions)
        return still and not any(motion.position for lane, motion in zip(self._lanes, self._motions, strict=True) if lane.kind == "effort")

    def _check(self, action: Tensor) -> None:
        if not self.started:
            raise SafetyError("nothing is sent before the robot's state has been measured")
        if action.shape[0] != len(self._lanes):
            raise SafetyError(f"an action of {action.shape[0]} numbers for {len(self._lanes)} of {self.contract.name}; none is made up")
        if not bool(action.isfinite().all()):
            raise SafetyError(f"an action that is not finite: {action.tolist()}")

    def _resting(self, state: Tensor | None) -> list[float]:
        """Where each axis is to stand."""
        values = None if state is None else state.tolist()
        places = []
        for lane, motion in zip(self._lanes, self._motions, strict=True):
            end = [motion, *lane.axis.braking(motion)][-1].position
            measured = values[lane.measured] if values is not None and lane.measured >= 0 else end
            places.append(0.0 if lane.kind == "effort" else measured if lane.kind == "position" else end)
        return places

    def _settle(self, motions: list[Motion]) -> tuple[str, ...]:
        """Take these motions, or brake where the tool could not stay in its workspace behind them."""
        told: tuple[str, ...] = ()
        if self._forward is not None and self.contract.workspace.bounded and not self._inside(self._forward, motions):
            told = ("the tool would leave its workspace or exceed its speed",)
            motions = [lane.axis.rest(motion) for lane, motion in zip(self._lanes, self._motions, strict=True)]
        self._before, self._motions, self._commanded = self._motions, motions, True
        return told

    def _inside(self, forward: Forward, motions: Sequence[Motion]) -> bool:
        """Whether the tool stays in its box, and below its speed, from now until all axes rest."""
        paths = [[motion, *lane.axis.braking(motion)] for lane, motion in zip(self._lanes, motions, strict=True)]
        longest = max(map(len, paths))
        ways = [
            [now.position] + [path[min(k, len(path) - 1)].position for k in range(longest)]
            for now, path in zip(self._motions, paths, strict=True)
        ]
        points = forward(torch.tensor(ways, dtype=torch.float64).T)
        space = self.contract.workspace
        low, high = points.new_tensor(space.low) - _SAME, points.new_tensor(space.high) + _SAME
        speeds = torch.linalg.vector_norm(points.diff(dim=0), dim=-1) / self._period
        return bool(((points[1:] >= low) & (points[1:] <= high)).all() & (speeds <= space.speed + _SAME).all())

    def _sent(self) -> list[float]:
        return [_encoded(lane, motion, self._period) for lane, motion in zip(self._lanes, self._motions, strict=True)]


def _lane(contract: Contract, command: Command, place: int) -> _Lane:
    feature = command.feature
    low, high, speed = feature.low[place], feature.high[place], command.speed
    measured, edges = -1, (-inf, inf)
    if command.measured:
        known = {entry.name: entry for entry in contract.state}[command.measured]
        measured = contract.state_columns(command.measured).start + place
        edges = known.low[place] + command.lag, known.high[place] - command.lag
    kind: Kind = "step" if command.meaning == "step" else command.control
    period = 1.0 / contract.rate
    if command.moves:
        unit = contract.rate if kind == "step" else 1.0
        axis = Axis(period, *edges, min(speed, max(-low, high) * unit), command.acceleration, command.jerk)
    elif kind == "effort":
        axis = Axis(period, low, high, speed)
    else:
        axis = Axis(period, low, high, speed, command.acceleration, command.jerk)
    return _Lane(f"{feature.name}[{place}]", kind, axis, low, high, measured if kind != "effort" else -1, command.lag)


def _next(lane: _Lane, motion: Motion, value: float, drift: float) -> Motion:
    if lane.kind in ("position", "effort"):
        return lane.axis.towards(motion, value, drift)
    inside = min(max(value, lane.low), lane.high)
    return lane.axis.at(motion, inside / lane.axis.period if lane.kind == "step" else inside)


def _stopping(lane: _Lane, motion: Motion, place: float) -> Motion:
    return lane.axis.towards(motion, place) if lane.kind in ("position", "effort") else lane.axis.rest(motion)


def _encoded(lane: _Lane, motion: Motion, period: float) -> float:
    if lane.kind in ("position", "effort"):
        return motion.position
    return motion.velocity * period if lane.kind == "step" else motion.velocity
