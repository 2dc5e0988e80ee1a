"""Which topics feed a robot's contract and which it drives: one entry per camera, state feature and command, checked when it is made.

What ROS fixes is not declared again: joints are in rad and m, poses are quaternions x, y, z, w in metres. The contract says what the
loop counts in; the rest is arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

from mmsdk.errors import InputError
from mmsdk.vla.contract import UNITS, Command, Contract, Feature
from mmsdk.vla.ros.joints import Reads
from mmsdk.vla.ros.messages import CompressedImage, Image, JointState, JointTrajectory, PoseStamped, Twist, TwistStamped
from mmsdk.vla.ros.parameters import Parameter, Parameters
from mmsdk.vla.ros.twist import PARTS

__all__ = ["READS", "Binding", "CameraTopic", "CommandTopic", "Outgoing", "StateTopic", "bound", "declared"]

Outgoing = Literal["JointTrajectory", "Twist", "TwistStamped"]
_OUTGOING: tuple[Outgoing, ...] = ("JointTrajectory", "Twist", "TwistStamped")

READS: dict[str, Reads] = {"joint": "position", "gripper": "position", "velocity": "velocity", "effort": "effort"}
"""Which field of a JointState holds a feature of each kind."""

_POSES = ("position", "rotation")


@dataclass(frozen=True, slots=True)
class CameraTopic:
    """A camera's pictures: sensor_msgs/Image, or CompressedImage where `compressed`."""

    camera: str
    topic: str
    compressed: bool = False


@dataclass(frozen=True, slots=True)
class StateTopic:
    """A state feature: the joints `names` of a JointState, in the feature's order; of a PoseStamped (positions, rotations) no names."""

    feature: str
    topic: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CommandTopic:
    """A command: the joints `names` of a JointTrajectory, or parts of a Twist ("linear.x"), in the feature's order."""

    command: str
    topic: str
    names: tuple[str, ...]
    message: Outgoing = "JointTrajectory"


@dataclass(frozen=True, slots=True)
class Binding:
    """All topics of one robot. `slop`: the seconds within which an observation's parts were measured; 0 takes the newest of each."""

    contract: Contract
    cameras: tuple[CameraTopic, ...]
    state: tuple[StateTopic, ...]
    commands: tuple[CommandTopic, ...]
    slop: float = 0.0

    def __post_init__(self) -> None:
        """Raises InputError for a part of the contract without a topic, and topics, names or messages that do not go with it."""
        contract = self.contract
        _check_all("cameras", [entry.camera for entry in self.cameras], [camera.name for camera in contract.cameras])
        _check_all("state", [entry.feature for entry in self.state], [feature.name for feature in contract.state])
        _check_all("commands", [entry.command for entry in self.commands], [command.feature.name for command in contract.action])
        if not (isfinite(self.slop) and self.slop >= 0):
            raise InputError(f"slop {self.slop}, expected seconds from 0", item="binding")
        features = {feature.name: feature for feature in contract.state}
        kinds: dict[str, str] = {}
        for camera in self.cameras:
            _check_topic(kinds, camera.topic, f"the camera {camera.camera}")
        for state in self.state:
            _check_state(state, features[state.feature])
            _check_topic(kinds, state.topic, "PoseStamped" if features[state.feature].kind in _POSES else "JointState")
        commands = {command.feature.name: command for command in contract.action}
        driven: list[tuple[str, str]] = []
        for entry in self.commands:
            command = commands[entry.command]
            _check_command(entry, command)
            _check_topic(kinds, entry.topic, f"{entry.message} by {command.control}")
            driven += [(entry.topic, name) for name in entry.names]
        if len(set(driven)) != len(driven):
            raise InputError(f"one joint is driven twice: {', '.join(name for _, name in driven)}", item="binding")

    @property
    def inputs(self) -> tuple[str, ...]:
        """The topics to subscribe to."""
        return tuple(dict.fromkeys([*(entry.topic for entry in self.cameras), *(entry.topic for entry in self.state)]))

    @property
    def outputs(self) -> dict[str, Outgoing]:
        """The topics to publish, and what goes out on them."""
        return {entry.topic: entry.message for entry in self.commands}

    @property
    def input_types(self) -> dict[str, str]:
        """The topics to subscribe to, and the type of each ("sensor_msgs/msg/Image")."""
        kinds = {feature.name: feature.kind for feature in self.contract.state}
        pictures = {entry.topic: CompressedImage.ros_type if entry.compressed else Image.ros_type for entry in self.cameras}
        felt = {entry.topic: PoseStamped.ros_type if kinds[entry.feature] in _POSES else JointState.ros_type for entry in self.state}
        return pictures | felt

    @property
    def output_types(self) -> dict[str, str]:
        """The topics to publish, and the type of each."""
        types = {kind.__name__: kind.ros_type for kind in (JointTrajectory, Twist, TwistStamped)}
        return {topic: types[message] for topic, message in self.outputs.items()}


def declared(contract: Contract) -> tuple[Parameter, ...]:
    """The parameters by which a node is told its topics: cameras.<name>.topic, state.<name>.joints, action.<name>.message, ..."""
    found = [Parameter("slop", "double", 0.0, "an observation's parts lie within so many seconds; 0: the newest", low=0.0, read_only=True)]
    for camera in contract.cameras:
        found.append(_topic(f"cameras.{camera.name}"))
        found.append(Parameter(f"cameras.{camera.name}.compressed", "bool", False, "CompressedImage instead of Image", read_only=True))
    for feature in contract.state:
        found.append(_topic(f"state.{feature.name}"))
        found.append(Parameter(f"state.{feature.name}.names", "string_array", (), "joints, in the feature's order", read_only=True))
    for command in contract.action:
        name = f"action.{command.feature.name}"
        found.append(_topic(name))
        found.append(Parameter(f"{name}.names", "string_array", description="joints or parts of a Twist, in order", read_only=True))
        found.append(Parameter(f"{name}.message", "string", "JointTrajectory", choices=_OUTGOING, read_only=True))
    return tuple(found)


def bound(contract: Contract, parameters: Parameters) -> Binding:
    """The binding that a node's parameters tell, declared by `declared(contract)` and maybe others. Raises InputError as `Binding` does."""
    cameras = [
        CameraTopic(name, parameters.text(f"cameras.{name}.topic"), parameters.flag(f"cameras.{name}.compressed"))
        for name in (camera.name for camera in contract.cameras)
    ]
    state = [
        StateTopic(name, parameters.text(f"state.{name}.topic"), parameters.texts(f"state.{name}.names"))
        for name in (feature.name for feature in contract.state)
    ]
    commands = [
        CommandTopic(name, parameters.text(f"action.{name}.topic"), parameters.texts(f"action.{name}.names"), message)
        for name in (command.feature.name for command in contract.action)
        for message in _OUTGOING
        if message == parameters.text(f"action.{name}.message")
    ]
    return Binding(contract, tuple(cameras), tuple(state), tuple(commands), parameters.number("slop"))


def _topic(name: str) -> Parameter:
    return Parameter(f"{name}.topic", "string", description="the topic's name", read_only=True)


def _check_all(part: str, mine: Sequence[str], theirs: Sequence[str]) -> None:
    if sorted(mine) != sorted(theirs):
        raise InputError(f"{part}: topics for {', '.join(mine) or 'none'}; the contract has {', '.join(theirs) or 'none'}", item="binding")


def _check_topic(kinds: dict[str, str], topic: str, kind: str) -> None:
    """One topic carries one kind of message; one camera's pictures are not another's."""
    camera = kind.startswith("the camera")
    if not topic or (topic in kinds and (camera or kinds[topic] != kind)):
        was = kinds.get(topic, "a topic without a name")
        raise InputError(f"is {was} and {kind}", item=topic or "binding")
    kinds[topic] = kind


def _check_state(entry: StateTopic, feature: Feature) -> None:
    item = f"state {feature.name}"
    if feature.kind in _POSES:
        size = 3 if feature.kind == "position" else feature.size
        if entry.names or feature.size != size:
            raise InputError(f"a {feature.kind} comes whole from a PoseStamped: {size} numbers and no names of joints", item=item)
    elif feature.kind not in READS:
        raise InputError(f"no message of ROS holds what is only known as {feature.kind!r}", item=item)
    elif len(set(entry.names)) != feature.size or len(entry.names) != feature.size:
        raise InputError(f"{', '.join(entry.names) or 'no joints'} for {feature.size} numbers, expected one name each", item=item)


def _check_command(entry: CommandTopic, command: Command) -> None:
    feature = command.feature
    item = f"command {feature.name}"
    if command.meaning != "absolute" or feature.kind not in READS:
        raise InputError(f"is {command.meaning} and a {feature.kind}; joints and velocities go out, and absolute ones", item=item)
    if len(set(entry.names)) != feature.size or len(entry.names) != feature.size:
        raise InputError(f"{', '.join(entry.names) or 'no names'} for {feature.size} numbers, expected one name each", item=item)
    if entry.message == "JointTrajectory":
        return
    quantity = UNITS[feature.unit][0]
    fits = {"speed": "linear.", "turning": "angular."}.get(quantity, "none")
    if command.control != "velocity" or not all(name in PARTS and name.startswith(fits) for name in entry.names):
        told = f"{command.control} in {feature.unit} as {', '.join(entry.names)}"
        raise InputError(f"{told}; a Twist takes velocities, m/s for linear.x to z and rad/s for angular.x to z", item=item)
