"""The names of a rotation, against SciPy: the nearest is the same rotation, and limits are of the rotation and not of its spelling."""

from dataclasses import replace
from itertools import pairwise, product
from math import dist, pi, tau

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from mmsdk.errors import SafetyError
from mmsdk.vision.types import Image
from mmsdk.vla.chunk_check import check_chunk
from mmsdk.vla.contract import Camera, Command, Contract, Feature
from mmsdk.vla.equivalent import in_range, nearest, unwind
from mmsdk.vla.freshness import Freshness
from mmsdk.vla.gate import Gate
from mmsdk.vla.rotation import to_quaternion
from mmsdk.vla.types import Observation, Stamp

DT = 0.05
SIZES = {"xyzw": 4, "wxyz": 4, "axis_angle": 3, "euler_xyz": 3, "euler_ZYX": 3}
INF = float("inf")


def turn(layout: str, end: float, unit: str = "") -> Feature:
    size = SIZES[layout]
    return Feature("turn", "rotation", size, unit or ("one" if size == 4 else "rad"), (-end,) * size, (end,) * size, layout=layout)


def turning(layout: str, unit: str = "", end: float = 0.0, scale: float = 1.0, **more: float) -> Contract:
    """A hand that is turned, at most 2 rad/s."""
    feature = turn(layout, end or (1.0 if SIZES[layout] == 4 else pi * scale), unit)
    limits = {"speed": 2.0, "acceleration": 20.0, "jerk": 800.0, "lag": 0.5} | more
    command = Command(feature, "position", "absolute", "turn", **{name: limit * scale for name, limit in limits.items()})
    return Contract("hand", 20.0, (), (feature,), (command,))


def numbers(rotation: Rotation, layout: str) -> list[float]:
    """SciPy's one name for it."""
    if layout == "axis_angle":
        return list(map(float, rotation.as_rotvec()))
    if layout.startswith("euler"):
        return list(map(float, rotation.as_euler(layout.removeprefix("euler_"))))
    q = rotation.as_quat(canonical=True)
    return list(map(float, q if layout == "xyzw" else np.roll(q, 1)))


def rotation_of(values: list[float], layout: str) -> Rotation:
    if layout == "axis_angle":
        return Rotation.from_rotvec(values)
    if layout.startswith("euler"):
        return Rotation.from_euler(layout.removeprefix("euler_"), values)
    return Rotation.from_quat(values if layout == "xyzw" else np.roll(values, -1))


def every_name(values: list[float], layout: str) -> list[list[float]]:
    """All names of a rotation up to three turns away, slowly."""
    counts = range(-3, 4)
    if layout == "axis_angle":
        length = float(np.linalg.norm(values))
        return [[value / length * (length + tau * count) for value in values] for count in counts] if length > 1e-6 else [values]
    if not layout.startswith("euler"):
        return [values, [-value for value in values]]
    a, b, c = values
    spelt = [(a, b, c), (a + pi, pi - b, c + pi)]
    return [[angle + tau * count for angle, count in zip(each, add, strict=True)] for each in spelt for add in product(counts, repeat=3)]


@pytest.mark.parametrize("layout", list(SIZES))
@given(st.integers(0, 10_000), st.lists(st.floats(-4, 4), min_size=4, max_size=4))
@settings(max_examples=25, deadline=None)
def test_the_nearest_name_is_the_same_rotation_and_none_is_nearer(layout: str, seed: int, last: list[float]) -> None:
    rotation, before = Rotation.random(random_state=seed), last[: SIZES[layout]]
    values = numbers(rotation, layout)
    near = nearest(turn(layout, INF), values, before)
    assert (rotation_of(near, layout).inv() * rotation).magnitude() < 1e-6
    assert dist(near, before) <= min(dist(name, before) for name in every_name(values, layout)) + 1e-9


def test_no_turn_at_all_has_names_too() -> None:
    assert nearest(turn("axis_angle", INF), [0.0, 0.0, 0.0], [0.0, 0.0, 6.0]) == pytest.approx([0, 0, tau])
    assert nearest(turn("axis_angle", INF), [0.0, 0.0, 0.0], [0.0, 0.0, 0.1]) == [0.0, 0.0, 0.0]


def test_a_range_of_less_than_a_turn_is_a_limit_and_not_gone_through() -> None:
    assert nearest(turn("euler_xyz", 3.0), [0.0, 0.0, -2.9], [0.0, 0.0, 2.9]) == [0.0, 0.0, -2.9]
    assert nearest(turn("euler_xyz", pi), [0.0, 0.0, -2.9], [0.0, 0.0, 2.9]) == pytest.approx([0, 0, tau - 2.9])
    assert in_range(turn("euler_xyz", pi), [0.0, 0.0, tau - 2.9]) == pytest.approx([0, 0, -2.9])
    assert in_range(turn("axis_angle", pi), [0.0, 0.0, -4.0]) == pytest.approx([0, 0, tau - 4])


def test_an_axis_angle_is_unwound_as_the_same_rotation_turning_the_same_way() -> None:
    """The rates against a difference of SciPy's own numbers."""
    before, rate, small = np.array([0.3, -0.4, 4.9]), np.array([0.2, 0.5, -0.3]), 1e-6
    place, (turned,) = unwind(turn("axis_angle", pi), before.tolist(), [rate.tolist()])
    wanted = Rotation.from_rotvec(before).as_rotvec()
    after = Rotation.from_rotvec(before + small * rate).as_rotvec()
    np.testing.assert_allclose(place, wanted, atol=1e-9)
    np.testing.assert_allclose(turned, (after - wanted) / small, atol=1e-4)


# ------------------------------------------------------------------------------------------------- through the gate


def spin(count: int) -> list[Rotation]:
    """A tilted hand that turns on and on about z, at .8 rad/s, past half a turn and past a whole one."""
    return [Rotation.from_euler("xyz", [0.2, 0.1, 2.6 + 0.04 * step]) for step in range(count)]


@pytest.mark.parametrize("layout", list(SIZES))
def test_a_hand_that_turns_past_half_a_turn_does_not_sweep_back(layout: str) -> None:
    contract, way = turning(layout), spin(200)
    gate = Gate(contract)
    gate.start(torch.tensor(numbers(way[0], layout), dtype=torch.float64))
    low, high = contract.action[0].feature.low[0], contract.action[0].feature.high[0]
    for rotation in way:
        sent = gate.towards(torch.tensor(numbers(rotation, layout), dtype=torch.float64)).command.tolist()
        assert all(low - 1e-9 <= value <= high + 1e-9 for value in sent)
        assert (rotation_of(sent, layout).inv() * rotation).magnitude() < 0.05


def test_angles_in_degrees_turn_on_too() -> None:
    gate = Gate(turning("euler_xyz", "deg", scale=180 / pi))
    gate.start(torch.tensor([0.0, 0.0, 179.0]))
    told = [gate.towards(torch.tensor([0.0, 0.0, yaw], dtype=torch.float64)) for yaw in (179.5, -179.9, -179.2)]
    assert [float(verdict.command[2]) for verdict in told] == pytest.approx([179.5, -179.9, -179.2]) and not told[1].changes


def test_a_quaternion_that_changes_its_sign_stands_still() -> None:
    gate = Gate(turning("wxyz"))
    q = torch.tensor([0.6, 0.8, 0.0, 0.0], dtype=torch.float64)
    gate.start(q)
    assert torch.equal(gate.towards(-q).command, q) and gate.resting


def test_a_quaternion_on_its_way_is_sent_at_unit_length() -> None:
    gate = Gate(turning("xyzw", speed=0.5, acceleration=4.0, jerk=80.0))
    gate.start(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    far = torch.tensor([0.0, 0.0, 3**0.5 / 2, 0.5], dtype=torch.float64)
    sent = [gate.towards(far).command for _ in range(80)]
    assert max(abs(float(np.linalg.norm(command.numpy())) - 1) for command in sent) < 1e-9
    assert 0.1 < float(sent[12][2]) < 0.5
    torch.testing.assert_close(sent[-1], far, atol=1e-3, rtol=0)


def test_what_is_measured_under_another_name_is_where_it_was_sent() -> None:
    angles = Gate(turning("euler_xyz"))
    angles.start(torch.tensor([0.0, 0.0, 3.13]))
    angles.towards(torch.tensor([0.0, 0.0, 3.14]))
    assert angles.measure(torch.tensor([0.0, 0.0, -3.14])) == ""
    quaternions, q = Gate(turning("wxyz")), torch.tensor([0.6, 0.8, 0.0, 0.0], dtype=torch.float64)
    assert quaternions.agree([q, -q, q])
    quaternions.start(q)
    assert quaternions.measure(-q) == "" and torch.equal(quaternions.stop(-q).command, q)
    assert "measured" in quaternions.measure(torch.tensor([-0.8, 0.6, 0.0, 0.0]))


def test_steps_of_a_turn_are_followed_past_half_a_turn() -> None:
    """The steps themselves are small numbers; what measures them goes from 3.13 to -3.13."""
    contract = turning("euler_xyz")
    step = Feature("turn", "rotation", 3, "rad", (-0.05,) * 3, (0.05,) * 3, layout="euler_xyz")
    gate = Gate(replace(contract, action=(Command(step, "position", "step", "turn", lag=0.2),)))
    gate.start(torch.tensor([0.0, 0.0, 3.12]))
    for measured in (3.14, -3.12, -3.10):
        assert float(gate.towards(torch.tensor([0.0, 0.0, 0.02], dtype=torch.float64)).command[2]) == pytest.approx(0.02)
        assert gate.measure(torch.tensor([0.0, 0.0, measured])) == ""


def test_what_is_no_rotation_never_passes() -> None:
    contract = turning("xyzw")
    gate = Gate(contract)
    gate.start(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    with pytest.raises(SafetyError, match="turn is a quaternion of length 0.5"):
        gate.towards(torch.tensor([0.0, 0.0, 0.0, 0.5]))
    rows = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    with pytest.raises(SafetyError, match="first at step 1: turn is a quaternion of length 0"):
        check_chunk(contract, rows, rows[:1])


# ------------------------------------------------------------------------------------------------------ whole chunks


@pytest.mark.parametrize("layout", list(SIZES))
def test_a_chunk_past_half_a_turn_breaks_no_limit_and_a_jump_does(layout: str) -> None:
    contract = turning(layout)
    rows = torch.tensor([numbers(rotation, layout) for rotation in spin(40)], dtype=torch.float64)
    sent = torch.stack([rows[0], rows[0], rows[0]])
    assert not check_chunk(contract, rows, sent)
    jump = torch.cat((rows[:4], rows[24:]))
    assert {(found.step, found.limit) for found in check_chunk(contract, jump, sent)} >= {(4, "speed"), (4, "acceleration")}


def test_an_angle_beyond_its_whole_turn_is_spelt_inside_and_one_beyond_its_limit_told() -> None:
    rows = torch.tensor([[0.0, 0.0, 3.2]] * 2, dtype=torch.float64)
    assert not check_chunk(turning("euler_xyz"), rows, rows)
    assert [found.limit for found in check_chunk(turning("euler_xyz", end=3.0), rows, rows)] == ["value"]


def test_a_quaternion_that_changes_its_sign_is_no_motion_behind_a_still_picture() -> None:
    contract = replace(turning("wxyz"), cameras=(Camera("side", 4, 4, "rgb", "hwc"),))
    freshness, picture = Freshness(contract), Image(torch.zeros(3, 4, 4, dtype=torch.uint8))
    q = torch.tensor([0.6, 0.8, 0.0, 0.0], dtype=torch.float64)
    for tick in range(32):
        now = 0.05 * tick
        freshness.take(Observation({"side": picture}, -q if tick % 2 else q, "", Stamp(now)), now)
    assert not freshness.stale(now)
    freshness.take(Observation({"side": picture}, q.flip(0), "", Stamp(now + 0.05)), now + 0.05)
    assert "same picture" in freshness.stale(now + 0.05)


@pytest.mark.parametrize("layout", ["rot6d_rows", "rot6d_columns"])
def test_a_hand_does_not_leap_to_a_frame_half_a_turn_away(layout: str) -> None:
    """Number by number the way there leads through zeros, of which the frame on the other side is another one at once."""
    hand = Feature("hand", "rotation", 6, "one", (-1.0,) * 6, (1.0,) * 6, layout=layout)
    command = Command(hand, "position", "absolute", "hand", speed=1.0, acceleration=5.0, jerk=100.0)
    gate = Gate(Contract("hand", 20.0, (), (hand,), (command,)))
    begin = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    gate.start(begin)
    verdicts = [gate.towards(-begin) for _ in range(80)]
    assert any("hand: the way there leads past numbers that are no rotation" in each.changes for each in verdicts)
    sent = [to_quaternion(verdict.command, layout) for verdict in verdicts]
    assert all(float((before * after).sum().abs()) > 0.99 for before, after in pairwise(sent))
    # a frame that can be reached is gone to from there
    aside = torch.tensor([0.0, 1.0, 0.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close([gate.towards(aside).command for _ in range(160)][-1], aside)


@pytest.mark.parametrize("layout", ["wxyz", "xyzw"])
def test_a_quaternion_that_is_called_from_side_to_side_stays_one(layout: str) -> None:
    hand = Feature("hand", "rotation", 4, "one", (-1.0,) * 4, (1.0,) * 4, layout=layout)
    gate = Gate(Contract("hand", 20.0, (), (hand,), (Command(hand, "position", "absolute", "hand", speed=1.0),)))
    gate.start(torch.eye(4, dtype=torch.float64)[0])
    lengths = []
    for tick in range(400):
        place = torch.tensor([motion.position for motion in gate._motions], dtype=torch.float64)
        lengths.append(float(place.norm()))
        # wherever it is, across to there
        across = torch.eye(4, dtype=torch.float64)[int(place.abs().argmin())]
        gate.towards(across - place * (across @ place) / (place @ place) if tick % 2 else across)
    assert min(lengths) >= 0.5
