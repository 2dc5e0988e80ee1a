"""Trajectories and twists out, through ROS's bytes, and in again by the rules of the joint trajectory controller."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from mmsdk.errors import InputError
from mmsdk.vla.ros.messages import Duration, Header, JointTrajectory, JointTrajectoryPoint, Message, Time
from mmsdk.vla.ros.stamps import SECOND, time_of
from mmsdk.vla.ros.trajectory import joint_trajectory, read_trajectory
from mmsdk.vla.ros.twist import PARTS, read_twist, twist

JOINTS = ("a", "b", "c")
NOW = 100 * SECOND
ACTIONS = torch.arange(12, dtype=torch.float64).view(4, 3) / 7


@pytest.mark.parametrize("control", ["position", "velocity", "effort"])
def test_actions_come_back_in_anybodys_order(control: str, heard: Callable[[Message], object]) -> None:
    message = heard(joint_trajectory(JOINTS, ACTIONS, control, 0.05))
    targets = read_trajectory(message, ("c", "a", "b"), NOW, control)
    assert torch.equal(targets.values, ACTIONS[:, [2, 0, 1]]) and targets.begins == NOW
    assert targets.times.tolist() == [0.05, 0.1, 0.15, 0.2]
    point = message.points[0]
    filled = {name for name in ("positions", "velocities", "accelerations", "effort") if len(getattr(point, name))}
    assert filled == {{"position": "positions", "velocity": "velocities", "effort": "effort"}[control]}


def test_targets_are_interpolated_as_numpy_does() -> None:
    targets = read_trajectory(joint_trajectory(JOINTS, ACTIONS, "position", 0.05), JOINTS, NOW)
    for moment in (0, 50, 60, 149, 150, 199, 200, 900):
        expected = [np.interp(moment / 1000, targets.times.numpy(), ACTIONS[:, joint].numpy()) for joint in range(3)]
        np.testing.assert_allclose(targets.at(NOW + moment * SECOND // 1000).numpy(), expected, atol=1e-12)


def test_a_stamp_in_the_past_counts_and_an_end_in_the_past_is_refused() -> None:
    def begun(before: float) -> JointTrajectory:
        return joint_trajectory(JOINTS, ACTIONS, "position", 0.05, Header(time_of(NOW - round(before * SECOND))))

    assert read_trajectory(begun(0.1), JOINTS, NOW).begins == NOW - SECOND // 10
    assert read_trajectory(begun(0.2), JOINTS, NOW).at(NOW).tolist() == ACTIONS[-1].tolist()
    with pytest.raises(InputError, match=r"ended 0.100 s ago"):
        read_trajectory(begun(0.3), JOINTS, NOW)


def test_vr_07_no_joint_is_made_up() -> None:
    with pytest.raises(InputError, match=r"3 numbers an action for 4 joints \(a, b, c, d\)"):
        joint_trajectory((*JOINTS, "d"), ACTIONS, "position", 0.05)
    message = joint_trajectory(JOINTS, ACTIONS, "position", 0.05)
    for joints in (("a", "b"), ("a", "b", "c", "d"), ("a", "b", "x")):
        with pytest.raises(InputError, match=f"joints a, b, c, expected each of {', '.join(joints)} once"):
            read_trajectory(message, joints, NOW)


@pytest.mark.parametrize("wrong", [torch.full((1, 3), float("nan")), torch.full((2, 3), float("inf")), torch.zeros(0, 3)])
def test_vr_27_what_is_not_finite_does_not_go_out(wrong: torch.Tensor) -> None:
    with pytest.raises(InputError, match="numbers not finite"):
        joint_trajectory(JOINTS, wrong, "position", 0.05)


def point(moment: int, positions: tuple[float, ...] = (1.0, 2.0, 3.0), **more: tuple[float, ...]) -> JointTrajectoryPoint:
    return JointTrajectoryPoint(positions, **more, time_from_start=Duration(0, moment))


@pytest.mark.parametrize(
    ("points", "told"),
    [
        ((), "has no points"),
        ((point(5), point(5)), "does not rise strictly"),
        ((point(6), point(5)), "does not rise strictly"),
        ((dataclasses.replace(point(5), time_from_start=Duration(-1, 0)),), "does not rise strictly"),
        ((point(5, (1.0, 2.0)),), "point 0 has 2 numbers of position for 3 joints"),
        ((point(5), point(6, ())), "point 1 has 0 numbers of position"),
        ((point(5, velocities=(1.0,)),), "1 numbers of velocity"),
        ((point(5), point(6, (1.0, float("nan"), 3.0))), "point 1 is not finite"),
        ((dataclasses.replace(point(5), time_from_start=Duration(0, SECOND)),), "nanosec"),
    ],
)
def test_what_the_controller_refuses_is_refused(
    points: tuple[JointTrajectoryPoint, ...], told: str, heard: Callable[[Message], object]
) -> None:
    with pytest.raises(InputError, match=told):
        read_trajectory(heard(JointTrajectory(Header(), JOINTS, points)), JOINTS, NOW)


def test_a_joint_named_twice_and_a_period_of_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="each joint once"):
        joint_trajectory(("a", "a", "b"), ACTIONS, "position", 0.05)
    for period in (0.0, 1e-12, float("nan"), -1.0):
        with pytest.raises(InputError, match="at least a nanosecond"):
            joint_trajectory(JOINTS, ACTIONS, "position", period)
    with pytest.raises(InputError, match="joints a, a, b"):
        read_trajectory(JointTrajectory(Header(Time()), ("a", "a", "b"), (point(5),)), ("a", "b"), NOW)


def test_a_twist_has_six_numbers_by_name(heard: Callable[[Message], object]) -> None:
    message = heard(twist({"linear.x": 0.5, "angular.z": -1.0}))
    assert (message.linear.x, message.linear.y, message.angular.z) == (0.5, 0.0, -1.0)
    assert read_twist(message) == {**dict.fromkeys(PARTS, 0.0), "linear.x": 0.5, "angular.z": -1.0}
    for wrong in ({"linear.w": 1.0}, {"linear.x": float("nan")}):
        with pytest.raises(InputError, match="expected finite numbers of linear.x"):
            twist(wrong)
    broken = dataclasses.replace(twist({}), linear=dataclasses.replace(twist({}).linear, y=float("inf")))
    with pytest.raises(InputError, match=r"linear.y is not finite"):
        read_twist(heard(broken))
