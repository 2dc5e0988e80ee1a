"""The tree of frames against SciPy's rotations and slerp; what lies outside of what is known is refused."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation, Slerp

from mmsdk.errors import InputError
from mmsdk.vla.ros.messages import Header, Message, Point, Pose, PoseStamped, Quaternion, Transform, TransformStamped, Vector3
from mmsdk.vla.ros.pose import Rigid, rigid_of_pose
from mmsdk.vla.ros.stamps import SECOND, time_of
from mmsdk.vla.ros.tf import TransformBuffer

MS = SECOND // 1000


def stamped(parent: str, child: str, moment: int, place: np.ndarray, turn: Rotation, sign: float = 1.0) -> TransformStamped:
    x, y, z, w = (sign * turn.as_quat()).tolist()
    return TransformStamped(Header(time_of(moment), parent), child, Transform(Vector3(*map(float, place)), Quaternion(x, y, z, w)))


def matrix(pose: Rigid) -> np.ndarray:
    found = np.eye(4)
    found[:3, :3], found[:3, 3] = Rotation.from_quat(pose.rotation).as_matrix(), pose.translation
    return found


def blended(places: np.ndarray, turns: Rotation, times: list[int], moment: int) -> np.ndarray:
    found = np.eye(4)
    found[:3, :3] = Slerp(times, turns)([moment]).as_matrix()[0]
    found[:3, 3] = [np.interp(moment, times, places[:, axis]) for axis in range(3)]
    return found


TIMES = [1000 * MS, 1050 * MS, 1100 * MS]
PLACES = np.random.default_rng(1).normal(size=(2, 3, 3))
TURNS = [Rotation.random(3, random_state=seed) for seed in (1, 2)]
MOUNT = np.array([0.0, 0.1, 0.2]), Rotation.from_euler("xyz", [10, 20, 30], degrees=True)


def tree(heard: Callable[[Message], object] = lambda message: message) -> TransformBuffer:
    """world -> base -> tool -> camera, and world -> table; base and tool move, the camera's mount and the table stand still."""
    buffer = TransformBuffer()
    for place, moment in enumerate(TIMES):
        # every other quaternion with the other sign: it is the same rotation
        buffer.take(heard(stamped("world", "base", moment, PLACES[0][place], TURNS[0][place], (-1.0) ** place)))
        buffer.take(heard(stamped("base", "tool", moment, PLACES[1][place], TURNS[1][place])))
    buffer.take(heard(stamped("tool", "camera", 0, *MOUNT)), static=True)
    buffer.take(heard(stamped("world", "table", 0, np.array([1.0, 0, 0]), Rotation.identity())), static=True)
    return buffer


@pytest.mark.parametrize("moment", [*TIMES, 1001 * MS, 1025 * MS, 1099 * MS + 7])
def test_frames_are_interpolated_at_the_pictures_stamp(moment: int, heard: Callable[[Message], object]) -> None:
    buffer = tree(heard)
    base, tool = (blended(PLACES[side], TURNS[side], TIMES, moment) for side in (0, 1))
    mount, table = np.eye(4), np.eye(4)
    mount[:3, :3], mount[:3, 3], table[:3, 3] = MOUNT[1].as_matrix(), MOUNT[0], [1, 0, 0]
    np.testing.assert_allclose(matrix(buffer.lookup("world", "camera", moment)), base @ tool @ mount, atol=1e-9)
    np.testing.assert_allclose(matrix(buffer.lookup("camera", "world", moment)), np.linalg.inv(base @ tool @ mount), atol=1e-9)
    np.testing.assert_allclose(matrix(buffer.lookup("table", "tool", moment)), np.linalg.inv(table) @ base @ tool, atol=1e-9)
    np.testing.assert_allclose(matrix(buffer.lookup("base", "camera", moment)), tool @ mount, atol=1e-9)
    np.testing.assert_allclose(matrix(buffer.lookup("tool", "tool", moment)), np.eye(4), atol=1e-12)


@pytest.mark.parametrize(("moment", "told"), [(999 * MS, "0.001 s before the first"), (1150 * MS, "0.050 s after the last")])
def test_nothing_is_extrapolated(moment: int, told: str) -> None:
    buffer = tree()
    with pytest.raises(InputError, match=f"in (world|base): asked for {told} transform that is known; nothing is extrapolated"):
        buffer.lookup("world", "camera", moment)
    # what stands still is known at any time
    assert buffer.lookup("world", "table", moment).translation == (1.0, 0.0, 0.0)
    with pytest.raises(InputError, match="name the stamp"):
        buffer.lookup("world", "camera", 0)


def test_frames_that_are_not_there_and_two_trees_are_named() -> None:
    buffer = tree()
    with pytest.raises(InputError, match="there is no frame 'lidar'; there is base, camera, table, tool, world"):
        buffer.lookup("world", "lidar", TIMES[0])
    buffer.take(stamped("map", "odom", TIMES[0], PLACES[0][0], TURNS[0][0]))
    with pytest.raises(InputError, match="two trees, under map and world"):
        buffer.lookup("world", "odom", TIMES[0])


def test_a_pose_is_moved_at_its_own_stamp(heard: Callable[[Message], object]) -> None:
    pose = PoseStamped(Header(time_of(1030 * MS), "camera"), Pose(Point(0.1, 0.2, 0.5), Quaternion()))
    moved = tree().moved(heard(pose), "world")
    expected = matrix(tree().lookup("world", "camera", 1030 * MS)) @ np.array([0.1, 0.2, 0.5, 1])
    found = moved.pose.position
    np.testing.assert_allclose([found.x, found.y, found.z, 1], expected, atol=1e-9)
    assert moved.header == Header(time_of(1030 * MS), "world")


def test_late_transforms_find_their_place_and_old_ones_leave() -> None:
    buffer = TransformBuffer(keep=0.1)
    still = Rotation.identity()
    for moment, x in ((1000, 0.0), (1080, 8.0), (1040, 4.0), (1040, 99.0)):
        buffer.take(stamped("world", "base", moment * MS, np.array([x, 0, 0]), still))
    assert buffer.lookup("world", "base", 1060 * MS).translation[0] == pytest.approx(6.0)
    buffer.take(stamped("world", "base", 1120 * MS, np.array([12.0, 0, 0]), still))
    with pytest.raises(InputError, match="before the first"):
        buffer.lookup("world", "base", 1010 * MS)
    with pytest.raises(InputError, match=r"base in world: is 0.120 s older than the newest"):
        buffer.take(stamped("world", "base", 1000 * MS, np.zeros(3), still))
    buffer.clear()
    with pytest.raises(InputError, match="there is no frame"):
        buffer.lookup("world", "base", 1100 * MS)


def test_static_frames_outlive_a_jump_of_the_clock() -> None:
    buffer = tree()
    buffer.clear()
    assert buffer.lookup("tool", "camera", 5 * SECOND).translation == pytest.approx((0.0, 0.1, 0.2))


@pytest.mark.parametrize(
    ("message", "static", "told"),
    [
        (stamped("", "x", SECOND, np.zeros(3), Rotation.identity()), False, "frames have names"),
        (stamped("/world", "x", SECOND, np.zeros(3), Rotation.identity()), False, "begin with no slash"),
        (stamped("x", "x", SECOND, np.zeros(3), Rotation.identity()), False, "x already stands in x"),
        (stamped("camera", "world", SECOND, np.zeros(3), Rotation.identity()), False, "camera already stands in world"),
        (stamped("table", "base", SECOND, np.zeros(3), Rotation.identity()), False, "base was moving in world, now it is moving in table"),
        (stamped("world", "base", SECOND, np.zeros(3), Rotation.identity()), True, "now it is static"),
        (stamped("world", "x", 0, np.zeros(3), Rotation.identity()), False, "is not stamped"),
        (stamped("world", "x", SECOND, np.array([0, np.nan, 0]), Rotation.identity()), False, "is not finite"),
    ],
)
def test_transforms_that_cannot_be_are_refused(message: TransformStamped, static: bool, told: str) -> None:
    buffer = tree()
    with pytest.raises(InputError, match=told):
        buffer.take(message, static)
    assert buffer.lookup("world", "base", TIMES[0]).translation == pytest.approx(tuple(PLACES[0][0]))


@pytest.mark.parametrize("keep", [0.0, float("nan"), float("inf"), 1e300])
def test_a_time_to_keep_transforms_for_is_a_number_of_seconds(keep: float) -> None:
    with pytest.raises(InputError, match="no time to keep transforms for"):
        TransformBuffer(keep)


def test_vr_23_a_quaternion_that_is_none_is_refused() -> None:
    for wrong, told in ((Quaternion(0.0, 0.0, 0.0, 0.0), "it was never set"), (Quaternion(0.0, 0.0, 0.0, 2.0), "has the length 2")):
        with pytest.raises(InputError, match=told):
            rigid_of_pose(Pose(Point(), wrong))


@given(st.integers(0, 10_000), st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_slerp_is_scipys_on_the_shorter_way(seed: int, share: float) -> None:
    turns = Rotation.random(2, random_state=seed)
    start, end = (Rigid((0.0, 0.0, 0.0), tuple(quaternion.tolist())) for quaternion in turns.as_quat())
    found = Rotation.from_quat(start.towards(end, share).rotation)
    assert (found.inv() * Slerp([0, 1], turns)([share])[0]).magnitude() < 1e-7
    near = start.towards(Rigid((0.0, 0.0, 0.0), tuple((turns[0] * Rotation.from_rotvec([1e-9, 0, 0])).as_quat().tolist())), share)
    assert (Rotation.from_quat(near.rotation).inv() * turns[0]).magnitude() < 1e-8
