"""From one contract to another: a robot's observations as a policy wants them, a policy's actions as the robot takes them.

Cameras and features are matched by name, under the names that are given where the two differ; what has no match is an error that lists
both sides. Relative and step-wise actions become absolute, and the other way round, by the state that the policy saw.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError, SafetyError
from mmsdk.vision.types import Image
from mmsdk.vla.camera import shown
from mmsdk.vla.contract import Command, Contract
from mmsdk.vla.convert import Conversion
from mmsdk.vla.types import Observation

__all__ = ["Absent", "Adapter", "Names"]

Absent = Literal["refuse", "black"]


@dataclass(frozen=True, slots=True)
class Names:
    """The policy's names to the robot's, where they differ."""

    cameras: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, str] = field(default_factory=dict)
    action: Mapping[str, str] = field(default_factory=dict)


class Adapter:
    """Between a robot and a policy. `absent` says whether a camera that the robot lacks is refused or shown as black."""

    def __init__(self, policy: Contract, robot: Contract, names: Names = Names(), absent: Absent = "refuse") -> None:
        """Raises InputError where a camera or feature has no match on the other side, or the two are not of one kind.

        And where the rates differ, or two of the policy's actions have one match.
        """
        if abs(policy.rate - robot.rate) > 1e-6 * robot.rate:
            raise InputError(f"{policy.rate:g} actions a second, but {robot.name} takes {robot.rate:g}", item=policy.name)
        self.policy, self.robot = policy, robot
        self._cameras = _cameras(policy, robot, names.cameras, absent)
        known = {feature.name: feature for feature in robot.state}
        mine = [feature.name for feature in policy.state]
        self._state = [
            (Conversion(known[name], feature), robot.state_columns(name))
            for feature, name in zip(policy.state, _matched("state", mine, list(known), names.state), strict=True)
        ]
        commands = {command.feature.name: command for command in policy.action}
        given = {_name(name, names.action): name for name in commands}
        if len(given) != len(commands):
            told = ", ".join(f"{name} as {_name(name, names.action)}" for name in commands)
            raise InputError(f"two actions of the policy drive one of the robot's: {told}", item=policy.name)
        theirs = [command.feature.name for command in robot.action]
        if sorted(given) != sorted(theirs):
            raise InputError(f"the policy makes {_listed(given)}, the robot takes {_listed(theirs)}; match them by Names(action=...)")
        self._pairs = [(commands[given[command.feature.name]], command) for command in robot.action]
        for made, taken in self._pairs:
            _check_meanings(made, taken)

    @property
    def absent(self) -> tuple[str, ...]:
        """The policy's cameras that the robot lacks."""
        return tuple(name for name, source in self._cameras.items() if not source)

    def observation(self, observation: Observation) -> Observation:
        """A robot's observation in the policy's names, units and orientation. Raises InputError for a picture that is missing."""
        images: dict[str, Image] = {}
        captured: dict[str, float] = {}
        for camera in self.policy.cameras:
            source = self._cameras[camera.name]
            if source and source not in observation.images:
                raise InputError(f"no picture of {source}; there is {_listed(observation.images)}", item=self.robot.name)
            height, width = camera.upright_size
            image = observation.images[source] if source else Image(torch.zeros(3, height, width, dtype=torch.uint8), "absent")
            images[camera.name] = shown(camera, image)
            captured[camera.name] = observation.captured.get(source, observation.stamp.captured)
        captured["state"] = observation.captured.get("state", observation.stamp.captured)
        return replace(observation, images=images, state=self.state(observation.state), captured=captured)

    def state(self, state: Float[Tensor, " p"]) -> Float[Tensor, " q"]:
        """A robot's state as the policy's."""
        if state.shape[0] != self.robot.state_size:
            raise InputError(f"a state of {state.shape[0]} numbers, expected {self.robot.state_size}", item=self.robot.name)
        parts = [conversion(state[columns]) for conversion, columns in self._state]
        return torch.cat(parts) if parts else state[:0]

    def actions(self, actions: Float[Tensor, "h a"], state: Float[Tensor, " p"]) -> Float[Tensor, "h r"]:
        """A policy's actions as the robot's; `state` is the robot's, that the policy saw.

        Raises InputError for too few or many numbers, SafetyError where one is not finite: no conversion may make something of it.
        """
        _check_width(self.policy, actions)
        if not bool(actions.isfinite().all()):
            step, column = (int(place) for place in (~actions.isfinite()).nonzero()[0])
            raise SafetyError(f"{self.policy.name}: actions that are not finite, first at step {step}, number {column}")
        seen = self.state(state)
        return torch.cat([_converted(made, taken, self.policy, actions, seen) for made, taken in self._pairs], dim=-1)

    def pending(self, actions: Float[Tensor, "k r"], state: Float[Tensor, " p"]) -> Float[Tensor, "k a"]:
        """A robot's pending actions as the policy's: the way back, relative to the same state."""
        _check_width(self.robot, actions)
        back = {made.feature.name: _converted(taken, made, self.robot, actions, state) for made, taken in self._pairs}
        return torch.cat([back[command.feature.name] for command in self.policy.action], dim=-1)


def _converted(source: Command, target: Command, contract: Contract, actions: Tensor, state: Tensor) -> Tensor:
    """One command's columns of actions in `contract`, whose state is `state`, as another contract's command."""
    values = actions[:, contract.action_columns(source.feature.name)]
    conversion = Conversion(source.feature, target.feature)
    if source.meaning == target.meaning:
        return conversion(values) if source.meaning == "absolute" else conversion.difference(values)
    origin = _measured(source, contract, state).to(values)
    summed = values.cumsum(0) if source.meaning == "step" else values
    absolute = summed if source.meaning == "absolute" else origin + summed
    if target.meaning == "absolute":
        return conversion(absolute)
    if target.meaning == "relative":
        return conversion.difference(absolute - origin)
    return conversion.difference(torch.diff(absolute, dim=0, prepend=origin[None]))


def _measured(command: Command, contract: Contract, state: Tensor) -> Tensor:
    """Where a state measures a command's feature, as the command means it: a gripper by what both say is opened and closed."""
    values = state[contract.state_columns(command.measured)]
    known = {feature.name: feature for feature in contract.state}[command.measured]
    return Conversion(known, replace(command.feature, binary=False))(values) if command.feature.kind == "gripper" else values


def _check_meanings(made: Command, taken: Command) -> None:
    item = f"{made.feature.name} -> {taken.feature.name}"
    Conversion(made.feature, taken.feature)
    if made.control != taken.control:
        raise InputError(f"{made.control} control cannot drive {taken.control} control", item=item)
    if made.meaning == taken.meaning:
        if made.meaning != "absolute":
            Conversion(made.feature, taken.feature).difference(torch.zeros(1, made.feature.size))
        return
    if made.feature.kind == "rotation":
        raise InputError(f"turns that are {made.meaning} are not made {taken.meaning}; declare the same on both sides", item=item)
    if not (made.measured and taken.measured):
        raise InputError(f"{made.meaning} becomes {taken.meaning} by the measured state: name it on both sides", item=item)


def _cameras(policy: Contract, robot: Contract, names: Mapping[str, str], absent: Absent) -> dict[str, str]:
    """The robot's camera for each of the policy's; "" for one that it lacks and that is shown as black."""
    mine, theirs = [camera.name for camera in policy.cameras], [camera.name for camera in robot.cameras]
    if absent == "refuse":
        return dict(zip(mine, _matched("cameras", mine, theirs, names), strict=True))
    found = {name: _name(name, names) for name in mine}
    wrong = sorted(set(names) - set(mine)) + sorted(set(names.values()) - set(theirs))
    if wrong or not set(found.values()) & set(theirs):
        raise InputError(f"cameras: {_listed(wrong) or 'none'} matched; the policy wants {_listed(mine)}, the robot has {_listed(theirs)}")
    return {name: source if source in theirs else "" for name, source in found.items()}


def _matched(part: str, mine: Sequence[str], theirs: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """The robot's name for each of the policy's."""
    found = [_name(name, names) for name in mine]
    wrong = [name for name in found if name not in theirs] + sorted(set(names) - set(mine))
    if wrong:
        told = f"{part}: no match for {_listed(wrong)}; the policy wants {_listed(mine)}, the robot has {_listed(theirs)}"
        raise InputError(f"{told}; match them by Names({part}=...)")
    return found


def _name(name: str, names: Mapping[str, str]) -> str:
    return names.get(name, name)


def _listed(names: "Mapping[str, object] | Sequence[str]") -> str:
    return ", ".join(names) or "none"


def _check_width(contract: Contract, actions: Tensor) -> None:
    if actions.shape[1] != contract.action_size:
        raise InputError(f"actions of {actions.shape[1]} numbers, expected {contract.action_size}; none is made up", item=contract.name)
