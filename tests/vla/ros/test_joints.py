"""Joint states in any order, in parts, and with what is missing; trajectories and twists out and back in."""

from collections.abc import Callable
from itertools import permutations

import pytest

from mmsdk.errors import InputError
from mmsdk.vla.ros.joints import Joints, joint_values
from mmsdk.vla.ros.messages import Header, JointState, Message, Time

NAMES = ("shoulder", "elbow", "wrist")


def state(names: tuple[str, ...], position: tuple[float, ...] = (), velocity: tuple[float, ...] = (), at: int = 5) -> JointState:
    return JointState(Header(Time(at, 0)), names, position, velocity)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_names_decide_and_not_the_order(order: tuple[int, ...], heard: Callable[[Message], object]) -> None:
    values = (0.1, 0.2, 0.3)
    joints = Joints(NAMES)
    assert joints.take(heard(state((*(NAMES[i] for i in order), "finger"), (*(values[i] for i in order), 9.0))))
    assert joints.values() == ([0.1, 0.2, 0.3], 5_000_000_000)


def test_an_arm_and_its_gripper_may_speak_one_after_the_other(heard: Callable[[Message], object]) -> None:
    joints = Joints(("shoulder", "finger"))
    assert joints.take(heard(state(("shoulder", "elbow"), (0.1, 0.2), at=7))) and joints.missing == ("finger",)
    with pytest.raises(InputError, match="nothing has been heard of finger"):
        joints.values()
    assert joints.take(heard(state(("finger",), (0.04,), at=6)))
    assert joints.values() == ([0.1, 0.04], 6_000_000_000)
    assert not joints.take(heard(state(("wheel",), ())))
    # late and out of order: nothing changes, and what is newer of it counts
    assert joints.take(heard(state(("shoulder", "finger"), (9.0, 0.05), at=6)))
    assert joints.values() == ([0.1, 0.05], 6_000_000_000)
    joints.clear()
    assert joints.missing == ("shoulder", "finger")


def test_empty_arrays_are_not_measured(heard: Callable[[Message], object]) -> None:
    message = heard(state(NAMES, (0.1, 0.2, 0.3)))
    assert joint_values(message) == dict(zip(NAMES, (0.1, 0.2, 0.3), strict=True))
    with pytest.raises(InputError, match="tells no velocity of shoulder, elbow, wrist"):
        joint_values(message, "velocity")
    only = heard(state(NAMES, velocity=(1.0, 2.0, 3.0)))
    assert joint_values(only, "velocity")["wrist"] == 3.0
    with pytest.raises(InputError, match="tells no position"):
        Joints(NAMES).take(only)
    assert joint_values(state(())) == {}


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (state(("elbow", "elbow"), (0.1, 0.2)), "elbow stand there twice"),
        (state(NAMES, (0.1, 0.2)), "2 numbers in position for 3 joints"),
        (state(NAMES, (0.1, 0.2, 0.3), (1.0,)), "1 numbers in velocity for 3 joints"),
        (state(NAMES, (0.1, float("nan"), 0.3)), "the position of elbow is not finite"),
        (state(NAMES, (0.1, 0.2, 0.3), at=0), "is not stamped"),
    ],
)
def test_broken_states_are_refused_whole(message: JointState, told: str, heard: Callable[[Message], object]) -> None:
    joints = Joints(NAMES)
    joints.take(state(NAMES, (1.0, 1.0, 1.0), at=1))
    with pytest.raises(InputError, match=f"joint state: .*{told}"):
        joints.take(heard(message))
    assert joints.values() == ([1.0, 1.0, 1.0], 1_000_000_000)


def test_joints_are_named_once() -> None:
    for names in ((), ("elbow", "elbow")):
        with pytest.raises(InputError, match="at least one joint and each once"):
            Joints(names)
