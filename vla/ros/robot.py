"""A robot behind ROS topics as the control loop knows robots: messages become observations, actions become messages.

Nothing here imports ROS. A node subscribes to `binding.inputs`, hands every message to `take`, and publishes what `send` is given.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from threading import Lock

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vision.intake.arrays import to_pixels
from mmsdk.vision.intake.limits import LIMITS, Limits
from mmsdk.vision.types import Image
from mmsdk.vla.camera import upright
from mmsdk.vla.clock import Clock
from mmsdk.vla.contract import UNITS, Camera, Contract, Feature
from mmsdk.vla.ros.binding import READS, Binding, CameraTopic
from mmsdk.vla.ros.commands import Sent, command_messages
from mmsdk.vla.ros.compressed import compressed_picture
from mmsdk.vla.ros.image import picture_of
from mmsdk.vla.ros.joints import Joints
from mmsdk.vla.ros.pose import Rigid, rigid_of_pose
from mmsdk.vla.ros.protocols import AnyCompressedImage, AnyImage, AnyJointState, AnyPoseStamped
from mmsdk.vla.ros.stamps import SECOND, stamped, time_of
from mmsdk.vla.ros.sync import Synchronizer
from mmsdk.vla.rotation import canonical, from_quaternion
from mmsdk.vla.types import Observation, Stamp

__all__ = ["RosRobot", "Send"]

Send = Callable[[str, Sent], None]
"""Publishes a message on a topic."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one topic told: pictures by camera, numbers by state feature, and the nanosecond at which the oldest of it was measured."""

    captured: int
    images: Mapping[str, Image] = field(default_factory=dict)
    values: Mapping[str, list[float]] = field(default_factory=dict)


class RosRobot:
    """A `Robot`. `take` and `clear` may be called from any thread.

    `clock` is the one that messages are stamped by (`SystemTime`, `SimTime`); the loop must go by the same. A message that cannot be used
    is refused when it comes, and what came before it grows old: that the loop then stops is its own doing.
    """

    def __init__(self, binding: Binding, clock: Clock, send: Send, instruction: str = "", limits: Limits = LIMITS) -> None:
        self.instruction = instruction
        self._binding, self._clock, self._send, self._limits = binding, clock, send, limits
        self._contract = binding.contract
        features = {feature.name: feature for feature in self._contract.state}
        self._joints: dict[str, list[tuple[Feature, Joints]]] = {}
        self._poses: dict[str, list[Feature]] = {}
        for entry in binding.state:
            feature = features[entry.feature]
            if feature.kind in READS:
                self._joints.setdefault(entry.topic, []).append((feature, Joints(entry.names, READS[feature.kind])))
            else:
                self._poses.setdefault(entry.topic, []).append(feature)
        self._cameras = {entry.topic: entry for entry in binding.cameras}
        self._parts: dict[str, _Part] = {}
        self._sync = Synchronizer[_Part](binding.inputs, binding.slop) if binding.slop else None
        self._lock = Lock()

    @property
    def contract(self) -> Contract:
        """See `Robot`."""
        return self._contract

    def take(self, topic: str, message: object) -> None:
        """Take in a message. One that is older than what is held changes nothing.

        Raises InputError, naming the topic or the camera, for one that is not of the topic's type, not stamped, or cannot be used.
        """
        with self._lock:
            part = self._read(topic, message)
            if part is None:
                return
            if self._sync is not None:
                matched = self._sync.take(topic, part.captured, part)
                # a set that late messages complete may be older than the one before it
                if matched is not None and _oldest(matched) >= _oldest(self._parts):
                    self._parts = matched
            elif topic not in self._parts or self._parts[topic].captured <= part.captured:
                self._parts[topic] = part

    def observe(self) -> Observation:
        """See `Robot`: the newest of each part, or of parts within the binding's slop. Raises InputError for topics not heard of."""
        with self._lock:
            parts = dict(self._parts)
        missing = [topic for topic in self._binding.inputs if topic not in parts]
        if missing:
            told = "nothing has been heard on" if self._sync is None else "nothing has been put together yet of"
            raise InputError(f"{told} {', '.join(missing)}", item=self._contract.name)
        images = {name: image for part in parts.values() for name, image in part.images.items()}
        values = {name: numbers for part in parts.values() for name, numbers in part.values.items()}
        state = torch.tensor([number for feature in self._contract.state for number in values[feature.name]], dtype=torch.float64)
        oldest = _oldest(parts)
        captured = {name: part.captured / SECOND for part in parts.values() for name in part.images}
        captured["state"] = min((part.captured for part in parts.values() if part.values), default=oldest) / SECOND
        return Observation(images, state, self.instruction, Stamp(oldest / SECOND), captured)

    def apply(self, action: Float[Tensor, " a"]) -> None:
        """See `Robot`. Nothing is sent where anything about the action is wrong (InputError)."""
        now = time_of(round(self._clock.now() * SECOND))
        for topic, message in command_messages(self._binding, action[None], now).items():
            self._send(topic, message)

    def clear(self) -> None:
        """Forget all that was heard: the clock has gone back."""
        with self._lock:
            self._parts.clear()
            if self._sync is not None:
                self._sync.clear()
            for _, joints in self._each_joints():
                joints.clear()

    def _each_joints(self) -> Iterator[tuple[Feature, Joints]]:
        for pairs in self._joints.values():
            yield from pairs

    def _read(self, topic: str, message: object) -> _Part | None:
        """None where a message has nothing that is asked for, or not everything is known yet."""
        if topic in self._cameras:
            return self._seen(self._cameras[topic], message)
        if topic in self._joints:
            if not isinstance(message, AnyJointState):
                raise InputError(f"a {type(message).__name__}, expected a JointState", item=topic)
            return self._felt(self._joints[topic], message)
        if topic not in self._poses:
            raise InputError(f"is not asked for; asked for are {', '.join(self._binding.inputs)}", item=topic)
        if not isinstance(message, AnyPoseStamped):
            raise InputError(f"a {type(message).__name__}, expected a PoseStamped", item=topic)
        pose = rigid_of_pose(message.pose, topic)
        values = {feature.name: _of_pose(feature, pose) for feature in self._poses[topic]}
        return _Part(stamped(message.header.stamp, topic), values=values)

    def _seen(self, entry: CameraTopic, message: object) -> _Part:
        """Encodings tell the order of colours; where one leaves it open, the contract does."""
        (camera,) = [camera for camera in self._contract.cameras if camera.name == entry.camera]
        if entry.compressed:
            if not isinstance(message, AnyCompressedImage):
                raise InputError(f"a {type(message).__name__}, expected a CompressedImage", item=entry.topic)
            captured = stamped(message.header.stamp, entry.topic)
            return _Part(captured, {camera.name: _upright(camera, compressed_picture(message, self._limits, entry.topic).pixels)})
        if not isinstance(message, AnyImage):
            raise InputError(f"a {type(message).__name__}, expected an Image", item=entry.topic)
        captured = stamped(message.header.stamp, entry.topic)
        pixels = picture_of(message, self._limits, entry.topic, camera.colour)
        return _Part(captured, {camera.name: _upright(camera, to_pixels(pixels))})

    def _felt(self, pairs: list[tuple[Feature, Joints]], message: AnyJointState) -> _Part | None:
        told = [joints.take(message) for _, joints in pairs]
        if not any(told) or any(joints.missing for _, joints in pairs):
            return None
        values: dict[str, list[float]] = {}
        captured = []
        for feature, joints in pairs:
            numbers, oldest = joints.values()
            values[feature.name] = [number / UNITS[feature.unit][1] for number in numbers]
            captured.append(oldest)
        return _Part(min(captured), values=values)


def _oldest(parts: Mapping[str, _Part]) -> int:
    return min((part.captured for part in parts.values()), default=0)


def _upright(camera: Camera, pixels: Tensor) -> Image:
    """RGB planes of a message, set upright as the contract declares the camera to stand."""
    return upright(replace(camera, colour="rgb", layout="chw"), pixels)


def _of_pose(feature: Feature, pose: Rigid) -> list[float]:
    if feature.kind == "position":
        return [number / UNITS[feature.unit][1] for number in pose.translation]
    x, y, z, w = pose.rotation
    q = torch.tensor((w, x, y, z), dtype=torch.float64)
    turned = from_quaternion(q if feature.keep_sign else canonical(q), feature.layout)
    # angles may be in degrees; quaternions and matrices have no unit
    scale = UNITS[feature.unit][1] if feature.layout.startswith(("euler", "axis")) else 1.0
    return [number / scale for number in turned.tolist()]
