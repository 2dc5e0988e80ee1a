"""ROS 2 messages as frozen values: what this package makes, and can make and read where no ROS is installed.

Fields, their names and their order are those of common_interfaces and rcl_interfaces (Humble to Kilted); `ros_type` is the name on the
wire. Positions and translations are in metres, angles in rad, quaternions x, y, z, w. `mmsdk.vla.ros.rebuild` turns them into the classes
of rclpy or rosbags; `mmsdk.vla.ros.protocols` is what is read of anybody's messages.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

__all__ = [
    "Clock",
    "CompressedImage",
    "DiagnosticArray",
    "DiagnosticStatus",
    "Duration",
    "Header",
    "Image",
    "JointState",
    "JointTrajectory",
    "JointTrajectoryPoint",
    "KeyValue",
    "Level",
    "Message",
    "Point",
    "Pose",
    "PoseStamped",
    "Quaternion",
    "String",
    "TFMessage",
    "Time",
    "Transform",
    "TransformStamped",
    "Twist",
    "TwistStamped",
    "Vector3",
]


class Level(IntEnum):
    """How well something is (diagnostic_msgs/DiagnosticStatus.level)."""

    OK = 0
    WARN = 1
    ERROR = 2
    STALE = 3


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds and nanoseconds of ROS time. Zero means unstamped, or "now" in a trajectory."""

    ros_type: ClassVar[str] = "builtin_interfaces/msg/Time"
    sec: int = 0
    nanosec: int = 0


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds, rounded down, and nanoseconds on top."""

    ros_type: ClassVar[str] = "builtin_interfaces/msg/Duration"
    sec: int = 0
    nanosec: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """When something was measured, and in which frame."""

    ros_type: ClassVar[str] = "std_msgs/msg/Header"
    stamp: Time = Time()
    frame_id: str = ""


@dataclass(frozen=True, slots=True)
class String:
    """Text of any kind."""

    ros_type: ClassVar[str] = "std_msgs/msg/String"
    data: str = ""


@dataclass(frozen=True, slots=True)
class Image:
    """Raw pixels: `height` rows of `step` bytes, of which `width` pixels are used and the rest is padding."""

    ros_type: ClassVar[str] = "sensor_msgs/msg/Image"
    header: Header
    height: int
    width: int
    encoding: str
    is_bigendian: int
    step: int
    data: bytes


@dataclass(frozen=True, slots=True)
class CompressedImage:
    """An encoded picture: "jpeg", "png", or "rgb8; jpeg compressed bgr8"."""

    ros_type: ClassVar[str] = "sensor_msgs/msg/CompressedImage"
    header: Header
    format: str
    data: bytes


@dataclass(frozen=True, slots=True)
class JointState:
    """Joints by name, in any order; an array that is empty was not measured."""

    ros_type: ClassVar[str] = "sensor_msgs/msg/JointState"
    header: Header
    name: tuple[str, ...]
    position: tuple[float, ...] = ()
    velocity: tuple[float, ...] = ()
    effort: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Vector3:
    """A direction or a translation."""

    ros_type: ClassVar[str] = "geometry_msgs/msg/Vector3"
    x: float = 0.0
    y: float = 0.0
    z: float = 0.0


@dataclass(frozen=True, slots=True)
class Point:
    """A place."""

    ros_type: ClassVar[str] = "geometry_msgs/msg/Point"
    x: float = 0.0
    y: float = 0.0
    z: float = 0.0


@dataclass(frozen=True, slots=True)
class Quaternion:
    """A rotation; w comes last."""

    ros_type: ClassVar[str] = "geometry_msgs/msg/Quaternion"
    x: float = 0.0
    y: float = 0.0
    z: float = 0.0
    w: float = 1.0


@dataclass(frozen=True, slots=True)
class Pose:
    """A place and a rotation."""

    ros_type: ClassVar[str] = "geometry_msgs/msg/Pose"
    position: Point = Point()
    orientation: Quaternion = Quaternion()


@dataclass(frozen=True, slots=True)
class PoseStamped:
    """A pose in a frame, at a time."""

    ros_type: ClassVar[str] = "geometry_msgs/msg/PoseStamped"
    header: Header
    pose: Pose


@dataclass(frozen=True, slots=True)
class Transform:
    """From the child's coordinates to the parent's."""

    ros_type: ClassVar[str] = "geometry_msgs/msg/Transform"
    translation: Vector3 = Vector3()
    rotation: Quaternion = Quaternion()


@dataclass(frozen=True, slots=True)
class TransformStamped:
    """Where the frame `child_frame_id` stands in the frame of the header."""

    ros_type: ClassVar[str] = "geometry_msgs/msg/TransformStamped"
    header: Header
    child_frame_id: str
    transform: Transform


@dataclass(frozen=True, slots=True)
class TFMessage:
    """What travels on /tf and /tf_static."""

    ros_type: ClassVar[str] = "tf2_msgs/msg/TFMessage"
    transforms: tuple[TransformStamped, ...]


@dataclass(frozen=True, slots=True)
class Twist:
    """Velocities: m/s and rad/s."""

    ros_type: ClassVar[str] = "geometry_msgs/msg/Twist"
    linear: Vector3 = Vector3()
    angular: Vector3 = Vector3()


@dataclass(frozen=True, slots=True)
class TwistStamped:
    """Velocities in a frame, at a time."""

    ros_type: ClassVar[str] = "geometry_msgs/msg/TwistStamped"
    header: Header
    twist: Twist


@dataclass(frozen=True, slots=True)
class JointTrajectoryPoint:
    """Where all joints of a trajectory are `time_from_start` after its beginning; arrays are empty or as long as the joints' names."""

    ros_type: ClassVar[str] = "trajectory_msgs/msg/JointTrajectoryPoint"
    positions: tuple[float, ...] = ()
    velocities: tuple[float, ...] = ()
    accelerations: tuple[float, ...] = ()
    effort: tuple[float, ...] = ()
    time_from_start: Duration = Duration()


@dataclass(frozen=True, slots=True)
class JointTrajectory:
    """Points that a joint trajectory controller goes through; it begins at the header's stamp, at once where that is zero."""

    ros_type: ClassVar[str] = "trajectory_msgs/msg/JointTrajectory"
    header: Header
    joint_names: tuple[str, ...]
    points: tuple[JointTrajectoryPoint, ...]


@dataclass(frozen=True, slots=True)
class Clock:
    """The time of a simulation, as /clock tells it."""

    ros_type: ClassVar[str] = "rosgraph_msgs/msg/Clock"
    clock: Time


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One line of a status."""

    ros_type: ClassVar[str] = "diagnostic_msgs/msg/KeyValue"
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class DiagnosticStatus:
    """How one component is."""

    ros_type: ClassVar[str] = "diagnostic_msgs/msg/DiagnosticStatus"
    level: Level
    name: str
    message: str
    hardware_id: str = ""
    values: tuple[KeyValue, ...] = ()


@dataclass(frozen=True, slots=True)
class DiagnosticArray:
    """What travels on /diagnostics."""

    ros_type: ClassVar[str] = "diagnostic_msgs/msg/DiagnosticArray"
    header: Header
    status: tuple[DiagnosticStatus, ...]


Message = (
    Time
    | Duration
    | Header
    | String
    | Image
    | CompressedImage
    | JointState
    | Vector3
    | Point
    | Quaternion
    | Pose
    | PoseStamped
    | Transform
    | TransformStamped
    | TFMessage
    | Twist
    | TwistStamped
    | JointTrajectoryPoint
    | JointTrajectory
    | Clock
    | KeyValue
    | DiagnosticStatus
    | DiagnosticArray
)
"""Any of the above."""
