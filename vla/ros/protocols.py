"""What is read of a message, whoever made it: rclpy, rosbags, another DDS binding, or `mmsdk.vla.ros.messages`.

Only names matter. Arrays may be tuples, lists, `array.array` (rclpy) or NumPy's (rosbags); nothing in them is trusted before it is checked.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = [
    "AnyClock",
    "AnyCompressedImage",
    "AnyHeader",
    "AnyImage",
    "AnyJointState",
    "AnyJointTrajectory",
    "AnyJointTrajectoryPoint",
    "AnyPose",
    "AnyPoseStamped",
    "AnyQuaternion",
    "AnyString",
    "AnyTime",
    "AnyTransform",
    "AnyTransformStamped",
    "AnyTwist",
    "AnyVector3",
    "Numbers",
    "Octets",
]

Numbers = Sequence[float] | npt.NDArray[np.float64]
"""A float64[] field."""

Octets = Sequence[int] | memoryview | npt.NDArray[np.uint8]
"""A uint8[] field; bytes are a sequence of whole numbers."""


@runtime_checkable
class AnyTime(Protocol):
    """builtin_interfaces Time and Duration."""

    @property
    def sec(self) -> int: ...
    @property
    def nanosec(self) -> int: ...


@runtime_checkable
class AnyHeader(Protocol):
    """std_msgs/Header."""

    @property
    def stamp(self) -> AnyTime: ...
    @property
    def frame_id(self) -> str: ...


@runtime_checkable
class AnyString(Protocol):
    """std_msgs/String."""

    @property
    def data(self) -> str: ...


@runtime_checkable
class AnyImage(Protocol):
    """sensor_msgs/Image."""

    @property
    def header(self) -> AnyHeader: ...
    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def encoding(self) -> str: ...
    @property
    def is_bigendian(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def data(self) -> Octets: ...


@runtime_checkable
class AnyCompressedImage(Protocol):
    """sensor_msgs/CompressedImage."""

    @property
    def header(self) -> AnyHeader: ...
    @property
    def format(self) -> str: ...
    @property
    def data(self) -> Octets: ...


@runtime_checkable
class AnyJointState(Protocol):
    """sensor_msgs/JointState."""

    @property
    def header(self) -> AnyHeader: ...
    @property
    def name(self) -> Sequence[str]: ...
    @property
    def position(self) -> Numbers: ...
    @property
    def velocity(self) -> Numbers: ...
    @property
    def effort(self) -> Numbers: ...


@runtime_checkable
class AnyVector3(Protocol):
    """geometry_msgs Vector3 and Point."""

    @property
    def x(self) -> float: ...
    @property
    def y(self) -> float: ...
    @property
    def z(self) -> float: ...


@runtime_checkable
class AnyQuaternion(AnyVector3, Protocol):
    """geometry_msgs/Quaternion."""

    @property
    def w(self) -> float: ...


@runtime_checkable
class AnyPose(Protocol):
    """geometry_msgs/Pose."""

    @property
    def position(self) -> AnyVector3: ...
    @property
    def orientation(self) -> AnyQuaternion: ...


@runtime_checkable
class AnyPoseStamped(Protocol):
    """geometry_msgs/PoseStamped."""

    @property
    def header(self) -> AnyHeader: ...
    @property
    def pose(self) -> AnyPose: ...


@runtime_checkable
class AnyTransform(Protocol):
    """geometry_msgs/Transform."""

    @property
    def translation(self) -> AnyVector3: ...
    @property
    def rotation(self) -> AnyQuaternion: ...


@runtime_checkable
class AnyTransformStamped(Protocol):
    """geometry_msgs/TransformStamped."""

    @property
    def header(self) -> AnyHeader: ...
    @property
    def child_frame_id(self) -> str: ...
    @property
    def transform(self) -> AnyTransform: ...


@runtime_checkable
class AnyTwist(Protocol):
    """geometry_msgs/Twist."""

    @property
    def linear(self) -> AnyVector3: ...
    @property
    def angular(self) -> AnyVector3: ...


@runtime_checkable
class AnyJointTrajectoryPoint(Protocol):
    """trajectory_msgs/JointTrajectoryPoint."""

    @property
    def positions(self) -> Numbers: ...
    @property
    def velocities(self) -> Numbers: ...
    @property
    def accelerations(self) -> Numbers: ...
    @property
    def effort(self) -> Numbers: ...
    @property
    def time_from_start(self) -> AnyTime: ...


@runtime_checkable
class AnyJointTrajectory(Protocol):
    """trajectory_msgs/JointTrajectory."""

    @property
    def header(self) -> AnyHeader: ...
    @property
    def joint_names(self) -> Sequence[str]: ...
    @property
    def points(self) -> Sequence[AnyJointTrajectoryPoint]: ...


@runtime_checkable
class AnyClock(Protocol):
    """rosgraph_msgs/Clock."""

    @property
    def clock(self) -> AnyTime: ...
