"""One number of an action as the gate drives it: what it commands, its axis and limits, and where the robot measures it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from mmsdk.vla.contract import Command, Contract, Feature
from mmsdk.vla.convert import Conversion
from mmsdk.vla.equivalent import endless, nearest
from mmsdk.vla.motion import Axis, Motion

__all__ = ["Lane", "Measuring", "lanes"]

Kind = Literal["position", "velocity", "step", "effort"]


@dataclass(frozen=True, slots=True)
class Lane:
    """A position is the axis's own; a velocity or a step is what it moves by; an effort is an axis of its own, whose place nobody knows.

    `measured` says whether the robot reports its position, `grips` that it commands how far a gripper is to close.
    """

    name: str
    kind: Kind
    axis: Axis
    low: float
    high: float
    measured: bool
    lag: float
    grips: bool

    @property
    def known(self) -> bool:
        """Whether its place on the robot is known, so that kinematics may be asked about it."""
        return self.kind == "position" or self.measured

    def next(self, motion: Motion, value: float, drift: float) -> Motion:
        """One tick towards a value that changes by `drift` a second."""
        if self.kind in ("position", "effort"):
            return self.axis.towards(motion, value, drift)
        inside = min(max(value, self.low), self.high)
        return self.axis.at(motion, inside / self.axis.period if self.kind == "step" else inside)

    def stopping(self, motion: Motion, place: float) -> Motion:
        """One tick of coming to rest: at a place for a position or an effort, anywhere for what is a motion itself."""
        return self.axis.towards(motion, place) if self.kind in ("position", "effort") else self.axis.rest(motion)

    def command(self, motion: Motion) -> float:
        """What is sent for a motion."""
        if self.kind in ("position", "effort"):
            return motion.position
        return motion.velocity * self.axis.period if self.kind == "step" else motion.velocity

    def parted(self, place: float, motion: Motion) -> str:
        """How far it is measured from where it was sent, where that is further than `lag`; "" where it is not.

        Never of a gripper: fingers around an object stay far from where they are sent, and that is what grips.
        """
        # NaN fails this comparison, as it should
        if not self.measured or self.grips or abs(place - motion.position) <= self.lag:
            return ""
        return f"{self.name}: measured {place:.4g}, commanded {motion.position:.4g}, allowed lag {self.lag:.4g}"


@dataclass(frozen=True, slots=True)
class Measuring:
    """How a state tells where the axes are, as their commands mean it: grippers by what is opened and closed on both sides, rotations by
    their name nearest to the last."""

    columns: tuple[tuple[slice, slice], ...]
    grippers: tuple[tuple[Conversion, slice, slice], ...]
    turns: tuple[tuple[Feature, slice], ...]

    @classmethod
    def of(cls, contract: Contract) -> "Measuring":
        """The measuring of a contract's commands."""
        known = {feature.name: feature for feature in contract.state}
        felt = [command for command in contract.action if command.measured and command.control != "effort"]
        places = {
            command.feature.name: (contract.state_columns(command.measured), contract.action_columns(command.feature.name))
            for command in felt
        }
        grippers = [command for command in felt if command.feature.kind == "gripper" and not command.moves]
        turns = [command for command in felt if known[command.measured].kind == "rotation"]
        return cls(
            tuple(places.values()),
            tuple((Conversion(known[each.measured], each.feature), *places[each.feature.name]) for each in grippers),
            tuple((known[each.measured], places[each.feature.name][1]) for each in turns),
        )

    def __call__(self, state: Float[Tensor, " p"], last: Sequence[float]) -> list[float]:
        """Where each axis is, by a state; `last` of those that nothing measures."""
        values, places = state.tolist(), list(last)
        for source, target in self.columns:
            places[target] = values[source]
        for conversion, source, target in self.grippers:
            places[target] = conversion(state[source].double()).tolist()
        for feature, target in self.turns:
            places[target] = nearest(feature, places[target], last[target])
        return places


def lanes(contract: Contract) -> list[Lane]:
    """The lanes of a contract's action, in order."""
    return [_lane(contract, command, place) for command, place, _ in contract.each_command()]


def _lane(contract: Contract, command: Command, place: int) -> Lane:
    feature, period = command.feature, 1.0 / contract.rate
    low, high, speed = feature.low[place], feature.high[place], command.speed
    kind: Kind = "step" if command.meaning == "step" else command.control
    if command.moves:
        unit = contract.rate if kind == "step" else 1.0
        axis = Axis(period, *_edges(contract, command, place), min(speed, max(-low, high) * unit), command.acceleration, command.jerk)
    elif kind == "effort":
        axis = Axis(period, low, high, speed)
    else:
        ends = (-inf, inf) if endless(feature)[place] else (low, high)
        axis = Axis(period, *ends, speed, command.acceleration, command.jerk)
    measured = bool(command.measured) and kind != "effort"
    grips = feature.kind == "gripper" and kind == "position"
    return Lane(f"{feature.name}[{place}]", kind, axis, low, high, measured, command.lag, grips)


def _edges(contract: Contract, command: Command, place: int) -> tuple[float, float]:
    """Where a motion is to end: `lag` before the ends of what is measured."""
    if not command.measured:
        return -inf, inf
    known = {entry.name: entry for entry in contract.state}[command.measured]
    return (-inf, inf) if endless(known)[place] else (known.low[place] + command.lag, known.high[place] - command.lag)
