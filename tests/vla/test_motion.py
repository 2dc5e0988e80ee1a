"""One axis: whatever is wanted of it, differences of its positions stay within the limits, and it can always stop."""

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmsdk.vla.motion import Axis, Motion

DT = 0.05
AXIS = Axis(DT, low=-2.0, high=2.0, speed=1.5, acceleration=6.0, jerk=120.0)


def differences(values: list[float], order: int) -> list[float]:
    for _ in range(order):
        values = [(after - before) / DT for before, after in pairwise(values)]
    return values


def judged(axis: Axis, positions: list[float]) -> None:
    """The checker: nothing but differences of the positions, which began at rest."""
    track = [positions[0]] * 3 + positions
    assert all(axis.low - 1e-7 <= position <= axis.high + 1e-7 for position in positions)
    for order, limit in ((1, axis.speed), (2, axis.acceleration), (3, axis.jerk)):
        assert max(map(abs, differences(track, order))) <= limit * (1 + 1e-6) + 1e-6, order


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=60), st.floats(-2, 2))
@settings(max_examples=40, deadline=None)
def test_any_targets_at_all_are_followed_within_the_limits(targets: list[float], start: float) -> None:
    motion, positions = Motion(start), [start]
    for target in targets:
        motion = AXIS.towards(motion, target)
        positions.append(motion.position)
    stop = AXIS.braking(motion)
    positions += [step.position for step in stop]
    assert not stop or (stop[-1].velocity, stop[-1].acceleration) == (0, 0)
    judged(AXIS, positions)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=60))
@settings(max_examples=40, deadline=None)
def test_any_velocities_at_all_keep_the_axis_inside(wanted: list[float]) -> None:
    motion, positions = Motion(1.0), [1.0]
    for velocity in wanted:
        motion = AXIS.at(motion, velocity)
        positions.append(motion.position)
    judged(AXIS, positions)


def test_what_the_limits_allow_passes_to_the_last_digit() -> None:
    motion = Motion(0.0)
    for target in (0.01, 0.03, 0.06, 0.09, 0.11, 0.12, 0.12, 0.12):
        motion = AXIS.towards(motion, target, (target - motion.position) / DT)
        assert motion.position == target


@pytest.mark.parametrize("axis", [AXIS, Axis(DT, speed=1.5, acceleration=6.0), Axis(DT, speed=1.5), Axis(DT)])
def test_a_far_target_is_reached_and_kept(axis: Axis) -> None:
    motion, positions = Motion(0.0), []
    for _ in range(60):
        motion = axis.towards(motion, 1.0)
        positions.append(motion.position)
    assert max(positions) <= 1.015 and positions[-1] == pytest.approx(1.0, abs=1e-3)


def test_a_stop_takes_the_time_that_physics_says() -> None:
    """From 1.5 rad/s at 6 rad/s^2: v / a + a / j = .3 s, give or take a tick, and v^2 / 2 a less half a tick's way."""
    path = AXIS.braking(Motion(0.0, 1.5, 0.0))
    assert abs(len(path) * DT - 0.3) <= DT + 1e-9
    assert path[-1].velocity == 0 and path[-1].position == pytest.approx(1.5**2 / 12 - 1.5 * DT / 2)


def test_a_velocity_is_reached_and_kept() -> None:
    motion = Motion(-2.0)
    for _ in range(20):
        motion = AXIS.at(motion, 1.0)
    before = motion
    motion = AXIS.at(motion, 1.0)
    assert motion.velocity == pytest.approx(1.0) and motion.position - before.position == pytest.approx(DT)


def test_an_axis_that_stands_outside_may_come_back_but_not_go_further() -> None:
    motion = Motion(2.5)
    assert AXIS.towards(motion, 3.0).position == 2.5
    for _ in range(40):
        after = AXIS.towards(motion, 0.0)
        assert after.position < motion.position
        motion = after
        if motion.position < 1.9:
            break
    assert motion.position < 2.0


@pytest.mark.parametrize("axis", [Axis(DT, jerk=10.0), Axis(DT, low=-3.0, high=3.0, acceleration=5.0, jerk=10.0), Axis(DT, jerk=1e-9)])
@pytest.mark.parametrize("far", [1e308, -1.7e308])
def test_a_target_at_the_end_of_all_floats_is_gone_towards_within_the_limits(axis: Axis, far: float) -> None:
    motion = axis.towards(Motion(0.0), far)
    assert 0 < motion.acceleration * (1 if far > 0 else -1) <= axis.jerk * DT * (1 + 1e-9)
    assert axis.at(Motion(0.0), far).acceleration == pytest.approx(motion.acceleration)


def test_an_axis_without_limits_goes_where_it_is_told() -> None:
    axis = Axis(DT)
    assert axis.towards(Motion(0.0), 100.0).position == 100.0 and axis.at(Motion(0.0), -7.0).velocity == -7.0
    assert axis.speed == inf
