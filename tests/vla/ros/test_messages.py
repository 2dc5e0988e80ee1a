"""Our messages against the definitions and the serialisation of ROS 2 as rosbags has them."""

import dataclasses
from array import array
from collections.abc import Callable
from typing import get_args

import pytest
from rosbags.typesys import Stores, get_typestore
from rosbags.typesys.store import Typestore

from mmsdk.errors import InputError
from mmsdk.vla.ros import messages, protocols
from mmsdk.vla.ros.lifecycle import Result, State, Transition
from mmsdk.vla.ros.messages import (
    DiagnosticArray,
    DiagnosticStatus,
    Duration,
    Header,
    Image,
    JointState,
    JointTrajectory,
    JointTrajectoryPoint,
    KeyValue,
    Level,
    Message,
    Time,
    TransformStamped,
    Twist,
    Vector3,
)
from mmsdk.vla.ros.rebuild import rclpy_messages, rebuilt
from mmsdk.vla.ros.stamps import duration_of, nanoseconds, seconds, stamped, time_of

KINDS = get_args(Message)
HEADER = Header(Time(1_790_000_000, 999_999_999), "base")


@pytest.mark.parametrize("distribution", [Stores.ROS2_HUMBLE, Stores.ROS2_JAZZY, Stores.ROS2_KILTED], ids=lambda each: each.name)
def test_fields_are_those_of_ros_in_its_order(distribution: Stores) -> None:
    definitions = get_typestore(distribution).fielddefs
    for kind in KINDS:
        real = [name for name, _ in definitions[kind.ros_type][1]]
        assert [entry.name for entry in dataclasses.fields(kind)] == real, kind.ros_type
    assert len(KINDS) == len({kind.ros_type for kind in KINDS}) == len(messages.__all__) - 2


def test_numbers_of_levels_and_lifecycles_are_those_of_ros(store: Typestore) -> None:
    status, state = store.types["diagnostic_msgs/msg/DiagnosticStatus"], store.types["lifecycle_msgs/msg/State"]
    transition = store.types["lifecycle_msgs/msg/Transition"]
    assert {level.name: level.value for level in Level} == {name: vars(status)[name] for name in ("OK", "WARN", "ERROR", "STALE")}
    assert all(vars(state)[f"PRIMARY_STATE_{each.name}"] == each for each in State)
    assert all(vars(transition)[f"TRANSITION_{each.name}"] == each for each in Transition)
    assert all(vars(transition)[f"TRANSITION_CALLBACK_{each.name}"] == each for each in Result)


def test_the_bytes_are_those_of_cdr(wired: Callable[[Message], bytes]) -> None:
    """Written out by hand from OMG's CDR: encapsulation, int32, uint32, string with its zero, sequences, doubles aligned to 8."""
    message = JointState(Header(Time(1, 2), "x"), ("a",), (1.0,), (), ())
    words = ["00010000", "01000000", "02000000", "02000000", "78000000", "01000000", "02000000", "61000000", "01000000"]
    assert wired(message).hex() == "".join([*words, "000000000000f03f", "00000000", "00000000"])


def test_what_was_sent_is_what_is_heard(heard: Callable[[Message], object]) -> None:
    point = JointTrajectoryPoint((0.1, -2.0), (), (), (), Duration(0, 50_000_000))
    trajectory = heard(JointTrajectory(HEADER, ("a", "b"), (point, dataclasses.replace(point, positions=(1.0, 2.0)))))
    assert isinstance(trajectory, protocols.AnyJointTrajectory)
    assert list(trajectory.joint_names) == ["a", "b"] and [list(each.positions) for each in trajectory.points] == [[0.1, -2.0], [1.0, 2.0]]
    assert nanoseconds(trajectory.points[0].time_from_start) == 50_000_000 and trajectory.header.frame_id == "base"
    twist = heard(Twist(Vector3(1.0, 2.0, 3.0), Vector3(z=-0.5)))
    assert isinstance(twist, protocols.AnyTwist) and (twist.linear.y, twist.angular.z) == (2.0, -0.5)
    status = DiagnosticStatus(Level.STALE, "camera", "silent", "usb", (KeyValue("fps", "0"),))
    array_ = heard(DiagnosticArray(HEADER, (status,)))
    assert array_.status[0].level == 3 and array_.status[0].values[0].key == "fps"


def test_every_protocol_knows_its_own_messages(heard: Callable[[Message], object]) -> None:
    """The message that ROS has under a protocol's name is one, and so is ours; a Time is none of the others."""
    empty = {"tuple": (), "str": "", "int": 0, "bytes": b""}
    for kind in KINDS:
        known = vars(protocols).get(f"Any{kind.__name__}")
        if known is None:
            continue
        needed = [entry for entry in dataclasses.fields(kind) if entry.default is dataclasses.MISSING]
        values = [HEADER if entry.type is Header else Time() if entry.type is Time else empty.get(_plain(entry.type)) for entry in needed]
        ours = kind(*[entry.type() if value is None else value for entry, value in zip(needed, values, strict=True)])
        assert isinstance(ours, known) and isinstance(heard(ours), known), kind.__name__
        assert kind in (Time, Duration) or not isinstance(Time(), known)


def _plain(kind: object) -> str:
    return getattr(kind, "__origin__", kind).__name__


def test_rclpy_gets_its_own_arrays_and_bytes() -> None:
    """rclpy takes array.array for numbers, and one byte for a `byte`; its classes take their fields by name."""
    made: dict[str, dict[str, object]] = {}

    def kinds(name: str) -> Callable[..., object]:
        def build(**fields: object) -> object:
            made[name] = fields
            return name

        return build

    target = rclpy_messages(kinds)
    rebuilt(Image(HEADER, 1, 2, "mono8", 0, 2, b"\x01\xff"), target)
    assert (
        made["sensor_msgs/msg/Image"]["data"] == array("B", [1, 255]) and made["sensor_msgs/msg/Image"]["header"] == "std_msgs/msg/Header"
    )
    rebuilt(JointState(HEADER, ("a",), (0.5,)), target)
    assert made["sensor_msgs/msg/JointState"] == {
        "header": "std_msgs/msg/Header",
        "name": ["a"],
        "position": array("d", [0.5]),
        "velocity": array("d"),
        "effort": array("d"),
    }
    rebuilt(DiagnosticStatus(Level.WARN, "a", "b"), target)
    assert made["diagnostic_msgs/msg/DiagnosticStatus"]["level"] == b"\x01"
    assert rebuilt(TransformStamped(HEADER, "b", messages.Transform()), target) == "geometry_msgs/msg/TransformStamped"


def test_stamps_are_exact_and_checked() -> None:
    assert nanoseconds(HEADER.stamp) == 1_790_000_000_999_999_999 and time_of(nanoseconds(HEADER.stamp)) == HEADER.stamp
    assert seconds(Time(-1, 500_000_000)) == -0.5 and duration_of(-0.5) == Duration(-1, 500_000_000)
    assert duration_of(0.1 + 0.2) == Duration(0, 300_000_000)
    for wrong in (Time(0, 1_000_000_000), Time(0, -1), Time(2**31, 0)):
        with pytest.raises(InputError, match="stamp: sec"):
            nanoseconds(wrong)
    for length in (float("nan"), float("inf"), 2.0**31):
        with pytest.raises(InputError, match="do not fit into a duration"):
            duration_of(length)
    with pytest.raises(InputError, match="camera: is not stamped"):
        stamped(Time(), "camera")
