"""Topics and the contract they feed: every part has one, every name fits, and what ROS does not carry is refused before anything runs."""

from dataclasses import replace

import pytest

from mmsdk.errors import InputError
from mmsdk.vla.contract import Camera, Command, Contract, Feature
from mmsdk.vla.ros.binding import Binding, CameraTopic, CommandTopic, StateTopic, bound, declared
from mmsdk.vla.ros.parameters import Parameters, parse_parameters

WIDE = 1e6


def feature(name: str, kind: str, size: int, unit: str, **more: object) -> Feature:
    return Feature(name, kind, size, unit, (-WIDE,) * size, (WIDE,) * size, **more)


ARM = feature("arm", "joint", 2, "deg")
HAND = feature("hand", "gripper", 1, "mm", opened=80.0, closed=0.0)
PLACE = feature("place", "position", 3, "cm")
TURN = feature("turn", "rotation", 3, "deg", layout="euler_xyz")
ROLLING, TURNING = feature("rolling", "velocity", 1, "m/s"), feature("turning", "velocity", 1, "deg/s")
FRONT = Camera("front", 4, 6, "bgr", "hwc")
ROBOT = Contract(
    "mobile arm",
    20.0,
    (FRONT,),
    (ARM, HAND, PLACE, TURN),
    (
        Command(ARM, "position", "absolute", "arm"),
        Command(HAND, "position", "absolute", "hand"),
        Command(ROLLING, "velocity", "absolute"),
        Command(TURNING, "velocity", "absolute"),
    ),
)
CAMERAS = (CameraTopic("front", "/front/image_raw"),)
STATE = (
    StateTopic("arm", "/joint_states", ("shoulder", "elbow")),
    StateTopic("hand", "/joint_states", ("finger",)),
    StateTopic("place", "/tool"),
    StateTopic("turn", "/tool"),
)
COMMANDS = (
    CommandTopic("arm", "/arm/joint_trajectory", ("shoulder", "elbow")),
    CommandTopic("hand", "/arm/joint_trajectory", ("finger",)),
    CommandTopic("rolling", "/cmd_vel", ("linear.x",), "TwistStamped"),
    CommandTopic("turning", "/cmd_vel", ("angular.z",), "TwistStamped"),
)
BINDING = Binding(ROBOT, CAMERAS, STATE, COMMANDS)


def test_topics_are_listed_once() -> None:
    assert BINDING.inputs == ("/front/image_raw", "/joint_states", "/tool")
    assert BINDING.outputs == {"/arm/joint_trajectory": "JointTrajectory", "/cmd_vel": "TwistStamped"}


YAML = """
/robot:
  ros__parameters:
    slop: 0.02
    cameras: {front: {topic: /front/image_raw}}
    state:
      arm: {topic: /joint_states, names: [shoulder, elbow]}
      hand: {topic: /joint_states, names: [finger]}
      place: {topic: /tool}
      turn: {topic: /tool}
    action:
      arm: {topic: /arm/joint_trajectory, names: [shoulder, elbow]}
      hand: {topic: /arm/joint_trajectory, names: [finger]}
      rolling: {topic: /cmd_vel, names: [linear.x], message: TwistStamped}
      turning: {topic: /cmd_vel, names: [angular.z], message: TwistStamped}
"""


def test_a_parameter_file_tells_the_topics() -> None:
    found = bound(ROBOT, Parameters(declared(ROBOT), parse_parameters(YAML, "/robot")))
    assert found == replace(BINDING, slop=0.02)
    with pytest.raises(InputError, match=r"cameras.frnt.topic: is not declared; did you mean cameras.front.topic"):
        Parameters(declared(ROBOT), parse_parameters(YAML.replace("front: {", "frnt: {"), "/robot"))
    with pytest.raises(InputError, match=r"parameters: .*state.arm.topic.* missing"):
        Parameters(declared(ROBOT), {})
    with pytest.raises(InputError, match="'Odometry' is none of JointTrajectory, Twist, TwistStamped"):
        Parameters(declared(ROBOT), parse_parameters(YAML.replace("TwistStamped", "Odometry"), "/robot"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"cameras": ()}, "cameras: topics for none; the contract has front"),
        ({"cameras": (CameraTopic("side", "/side"),)}, "cameras: topics for side; the contract has front"),
        ({"state": STATE[1:]}, "state: topics for hand, place, turn; the contract has arm, hand, place, turn"),
        ({"commands": (*COMMANDS, COMMANDS[0])}, "commands: topics for arm, hand, rolling, turning, arm"),
        ({"slop": -0.1}, "slop -0.1"),
        ({"slop": float("nan")}, "slop nan"),
        ({"cameras": (CameraTopic("front", ""),)}, "a topic without a name"),
        ({"cameras": (CameraTopic("front", "/tool"),)}, "/tool: is the camera front and PoseStamped"),
        ({"state": (replace(STATE[0], topic="/tool"), *STATE[1:])}, "/tool: is JointState and PoseStamped"),
        ({"commands": (replace(COMMANDS[0], topic="/joint_states"), *COMMANDS[1:])}, "/joint_states: is JointState and JointTrajectory"),
        ({"commands": (*COMMANDS[:3], replace(COMMANDS[3], message="Twist"))}, "is TwistStamped by velocity and Twist by velocity"),
        ({"state": (replace(STATE[0], names=("shoulder",)), *STATE[1:])}, "state arm: shoulder for 2 numbers, expected one name each"),
        ({"state": (replace(STATE[0], names=("a", "a")), *STATE[1:])}, "a, a for 2 numbers"),
        ({"state": (*STATE[:2], replace(STATE[2], names=("x", "y", "z")), STATE[3])}, "a position comes whole from a PoseStamped"),
        ({"commands": (COMMANDS[0], replace(COMMANDS[1], names=("elbow",)), *COMMANDS[2:])}, "one joint is driven twice"),
        ({"commands": (*COMMANDS[:2], replace(COMMANDS[2], names=("angular.x",)), COMMANDS[3])}, "m/s for linear.x to z"),
        ({"commands": (*COMMANDS[:2], replace(COMMANDS[2], names=("linear.w",)), COMMANDS[3])}, "m/s for linear.x to z"),
        (
            {"commands": (replace(COMMANDS[0], message="Twist"), *COMMANDS[1:])},
            "position in deg as shoulder, elbow; a Twist takes velocities",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_named(changes: dict[str, object], told: str) -> None:
    with pytest.raises(InputError, match=told):
        replace(BINDING, **changes)


def test_what_ros_does_not_carry_is_refused() -> None:
    other = feature("mood", "other", 1, "one")
    with pytest.raises(InputError, match="no message of ROS holds what is only known as 'other'"):
        Binding(Contract("x", 20.0, (), (other,), (ROBOT.action[2],)), (), (StateTopic("mood", "/mood", ("x",)),), (COMMANDS[2],))
    place = Command(PLACE, "position", "absolute", "place")
    with pytest.raises(InputError, match="command place: is absolute and a position"):
        Binding(Contract("x", 20.0, (), (PLACE,), (place,)), (), (STATE[2],), (CommandTopic("place", "/goal", ("x", "y", "z")),))
    step = Command(ARM, "position", "step", "arm", lag=1.0)
    with pytest.raises(InputError, match="command arm: is step and a joint"):
        Binding(Contract("x", 20.0, (), (ARM,), (step,)), (), (STATE[0],), (COMMANDS[0],))
