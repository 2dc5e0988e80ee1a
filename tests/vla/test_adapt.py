"""Between contracts: cameras, units, grippers, rotations, relative actions; by declaration and never by guess."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from mmsdk.errors import InputError, ModelError, SafetyError
from mmsdk.vision.types import Image
from mmsdk.vla.adapt import Adapter, Names
from mmsdk.vla.camera import shown, upright
from mmsdk.vla.contract import Camera, Command, Contract, Feature
from mmsdk.vla.convert import Conversion
from mmsdk.vla.lint import Normalization
from mmsdk.vla.policy import load_policy
from mmsdk.vla.types import ActionChunk, Observation, Request, Stamp

WIDE = 1e9


def feature(name: str, size: int = 1, kind: str = "joint", unit: str = "rad", **more: object) -> Feature:
    low, high = more.pop("low", -WIDE), more.pop("high", WIDE)
    return Feature(name, kind, size, unit, (low,) * size, (high,) * size, **more)


def gripper(opened: float, closed: float, binary: bool = False) -> Feature:
    low, high = sorted((float(opened), float(closed)))
    return feature("gripper", 1, "gripper", "fraction", low=low, high=high, opened=float(opened), closed=float(closed), binary=binary)


def contract(
    name: str, cameras: tuple[Camera, ...] = (), arm: int = 6, unit: str = "rad", meaning: str = "absolute", size: int = 0
) -> Contract:
    joints = feature("joints", arm, unit=unit)
    lag = {"lag": 0.1} if meaning == "step" else {}
    extra = (feature("extra", size),) if size else ()
    return Contract(name, 20.0, cameras, (joints, *extra), (Command(joints, "position", meaning, "joints", **lag),))


def observed(state: list[float], **images: Image) -> Observation:
    return Observation(images, torch.tensor(state, dtype=torch.float64), "do it", Stamp(3.0))


class Echo:
    """A model that answers with what it was given: its own state, over and over, a number of its own behind it."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.seen: list[Request] = []

    def reset(self, episode: int) -> None:
        self.seen.clear()

    def __call__(self, request: Request) -> ActionChunk:
        self.seen.append(request)
        row = torch.full((self.width,), 9.0, dtype=torch.float64)
        row[: request.observation.state.shape[0]] = request.observation.state
        return ActionChunk(row.expand(4, -1), request.observation.stamp)


class Short:
    """A model that answers with six numbers."""

    def reset(self, episode: int) -> None:
        del episode

    def __call__(self, request: Request) -> ActionChunk:
        return ActionChunk(torch.zeros(4, 6), request.observation.stamp)


def test_vr_02_a_gripper_is_converted_by_what_both_declare() -> None:
    values = torch.tensor([[0.0], [1.0], [0.25]])
    to = Conversion(gripper(0, 1), gripper(1, -1))
    torch.testing.assert_close(to(values), torch.tensor([[1.0], [-1.0], [0.5]]))
    torch.testing.assert_close(Conversion(to.target, to.source)(to(values)), values)
    # LIBERO's takes only the two ends, and the sign the other way round
    torch.testing.assert_close(Conversion(gripper(1, 0), gripper(-1, 1, binary=True))(values), torch.tensor([[1.0], [-1.0], [1.0]]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_vr_27_a_gripper_command_that_is_not_finite_is_neither_opened_nor_closed(bad: float) -> None:
    """A binary gripper knows two ends, and a comparison puts NaN at one of them."""

    def hand(name: str, feature: Feature) -> Contract:
        return Contract(name, 20.0, (), (feature,), (Command(feature, "position", "absolute", "gripper"),))

    class Wild(Short):
        def __call__(self, request: Request) -> ActionChunk:
            return ActionChunk(torch.tensor([[0.0], [bad]]), request.observation.stamp)

    policy = load_policy(
        Wild(), hand("policy", gripper(0, 1)), hand("robot", gripper(0, 1, binary=True)), Normalization("identity", "identity", {})
    )
    with pytest.raises(SafetyError, match="policy: actions that are not finite, first at step 1, number 0"):
        policy(Request(observed([0.0]), torch.zeros(0, 1, dtype=torch.float64)))
    assert Conversion(gripper(0, 1), gripper(0, 1, binary=True))(torch.tensor([[float("nan")]])).isnan().all()


def test_vr_02_a_gripper_relative_to_what_was_seen_is_so_in_its_own_polarity() -> None:
    """Measured from 0 (opened) to 1 (closed), moved by the policy from 1 to -1: a quarter closed is 0.5, and half a unit on is halfway."""
    seen, made = gripper(0, 1), gripper(1, -1)
    policy = Contract("policy", 20.0, (), (seen,), (Command(made, "position", "relative", "gripper"),))
    robot = Contract("robot", 20.0, (), (seen,), (Command(seen, "position", "absolute", "gripper"),))
    adapter, state = Adapter(policy, robot), torch.tensor([0.25], dtype=torch.float64)
    actions = adapter.actions(torch.tensor([[-0.5], [1.0]], dtype=torch.float64), state)
    torch.testing.assert_close(actions, torch.tensor([[0.5], [-0.25]], dtype=torch.float64))
    torch.testing.assert_close(adapter.pending(actions, state), torch.tensor([[-0.5], [1.0]], dtype=torch.float64))


def test_vr_02_a_gripper_without_polarity_does_not_load() -> None:
    with pytest.raises(InputError, match="never guessed"):
        feature("gripper", 1, "gripper", "fraction", low=0.0, high=1.0)


@pytest.mark.parametrize("dims", [6, 7, 14])
def test_vr_06_a_robot_gets_as_many_numbers_as_it_has(dims: int) -> None:
    """A model 32 wide; its padding never reaches the robot."""
    robot, model = contract("robot", arm=dims), Echo(32)
    policy = load_policy(model, contract("policy", arm=dims), robot, Normalization("identity", "identity", {}, width=32))
    chunk = policy(Request(observed([0.5] * dims), torch.zeros(2, dims, dtype=torch.float64)))
    assert chunk.actions.shape == (4, dims) and bool((chunk.actions == 0.5).all())
    assert model.seen[0].observation.state.shape == (32,) and not model.seen[0].observation.state[dims:].any()
    assert model.seen[0].pending.shape == (2, 32)


def test_vr_07_too_few_numbers_are_refused_and_none_is_made_up() -> None:
    robot = contract("robot", arm=7)
    policy = load_policy(Short(), contract("policy", arm=7), robot, Normalization("identity", "identity", {}))
    with pytest.raises(ModelError, match="answers with 6 numbers an action, expected 7; none is made up"):
        policy(Request(observed([0.0] * 7), torch.zeros(0, 7, dtype=torch.float64)))
    adapter = Adapter(robot, robot)
    with pytest.raises(InputError, match="6 numbers, expected 7; none is made up"):
        adapter.actions(torch.zeros(3, 6), torch.zeros(7))


def test_vr_08_state_and_action_may_differ_in_size() -> None:
    robot = contract("robot", arm=7, size=1)
    adapter = Adapter(contract("policy", arm=7, size=1), robot)
    assert (robot.state_size, robot.action_size) == (8, 7)
    assert adapter.actions(torch.ones(2, 7), torch.zeros(8)).shape == (2, 7) and adapter.state(torch.zeros(8)).shape == (8,)


def red() -> np.ndarray:
    frame = np.zeros((4, 6, 3), np.uint8)
    frame[:2, :3] = (255, 0, 0)
    return frame


@pytest.mark.parametrize("layout", ["hwc", "chw"])
@pytest.mark.parametrize("colour", ["rgb", "bgr"])
def test_vr_20_a_red_object_is_red_for_the_model(colour: str, layout: str) -> None:
    camera = Camera("front", 4, 6, colour, layout)
    frame = red() if colour == "rgb" else red()[..., ::-1]
    image = upright(camera, frame if layout == "hwc" else frame.transpose(2, 0, 1))
    assert image.pixels[:, 0, 0].tolist() == [255, 0, 0] and image.size == (4, 6)
    wrong = frame.transpose(2, 0, 1) if layout == "hwc" else frame
    with pytest.raises(InputError, match="camera front: a frame of"):
        upright(camera, wrong)


@pytest.mark.parametrize("turned", [0, 90, 180, 270])
@pytest.mark.parametrize("mirrored", [False, True])
def test_a_frame_is_set_upright_and_back(turned: int, mirrored: bool) -> None:
    """Turned clockwise as numpy turns it, which is not how this package does it."""
    stands = np.rot90(red(), -(turned // 90))
    frame = stands[:, ::-1] if mirrored else stands
    camera = Camera("front", frame.shape[0], frame.shape[1], "rgb", "hwc", turned, mirrored)
    image = upright(camera, frame)
    assert image.pixels.permute(1, 2, 0).numpy().tolist() == red().tolist()
    assert shown(camera, image).pixels.permute(1, 2, 0).numpy().tolist() == frame.tolist()


def test_a_picture_is_fitted_with_black_borders() -> None:
    image = Image(torch.full((3, 10, 20), 200, dtype=torch.uint8))
    fitted = shown(Camera("base", 40, 40, "rgb", "hwc"), image)
    assert fitted.size == (40, 40) and bool((fitted.pixels[:, 10:30] == 200).all()) and not fitted.pixels[:, :10].any()


FRONT, BASE, WRIST = (Camera(name, 4, 6, "rgb", "hwc") for name in ("front", "base_0_rgb", "left_wrist_0_rgb"))


def test_vr_21_cameras_are_matched_by_explicit_names() -> None:
    robot, policy = contract("robot", (FRONT,)), contract("policy", (BASE,))
    with pytest.raises(InputError, match="the policy wants base_0_rgb, the robot has front"):
        Adapter(policy, robot)
    with pytest.raises(InputError, match="no match for wrong"):
        Adapter(policy, robot, Names(cameras={"base_0_rgb": "wrong"}))
    with pytest.raises(InputError, match="no match for base"):
        Adapter(policy, robot, Names(cameras={"base_0_rgb": "front", "base": "front"}))
    adapter = Adapter(policy, robot, Names(cameras={"base_0_rgb": "front"}))
    image = upright(FRONT, red())
    assert torch.equal(adapter.observation(observed([0.0] * 6, front=image)).images["base_0_rgb"].pixels, image.pixels)
    with pytest.raises(InputError, match="no picture of front; there is side"):
        adapter.observation(observed([0.0] * 6, side=image))


def test_vr_22_a_missing_camera_is_refused_or_black_and_named() -> None:
    """Which mask goes with the black picture is the family's rule (pi0 hides it, pi0-FAST does not): `absent` tells it which ones."""
    robot, policy = contract("robot", (BASE,)), contract("policy", (BASE, WRIST))
    with pytest.raises(InputError, match="no match for left_wrist_0_rgb"):
        Adapter(policy, robot)
    adapter = Adapter(policy, robot, absent="black")
    observation = adapter.observation(observed([0.0] * 6, base_0_rgb=upright(BASE, red())))
    assert adapter.absent == ("left_wrist_0_rgb",) and not observation.images["left_wrist_0_rgb"].pixels.any()


def test_vr_24_a_tool_frame_is_applied_once_and_undone() -> None:
    tool = Rotation.from_euler("z", 90, degrees=True)
    flange = feature("turn", 4, "rotation", "one", layout="xyzw")
    turned = feature("turn", 3, "rotation", "deg", layout="euler_xyz", tool=tuple(np.roll(tool.as_quat(), 1)))
    rotation = Rotation.random(16, random_state=3)
    values = torch.from_numpy(rotation.as_quat(canonical=True))
    there = Conversion(flange, turned)(values)
    torch.testing.assert_close(there, torch.from_numpy((rotation * tool).as_euler("xyz", degrees=True)), atol=1e-6, rtol=0)
    torch.testing.assert_close(Conversion(turned, flange)(there), values, atol=1e-6, rtol=0)


def test_units_are_converted_and_other_quantities_refused() -> None:
    torch.testing.assert_close(Conversion(feature("x", unit="deg"), feature("x"))(torch.tensor([180.0])), torch.tensor([torch.pi]))
    with pytest.raises(InputError, match="mm cannot be turned into rad"):
        Conversion(feature("x", unit="mm"), feature("x"))
    with pytest.raises(InputError, match="a joint is no position"):
        Conversion(feature("x"), feature("x", kind="position", unit="m"))


@pytest.mark.parametrize("meaning", ["absolute", "relative", "step"])
@given(st.lists(st.floats(-3, 3), min_size=6, max_size=6), st.integers(1, 5))
@settings(max_examples=15, deadline=None)
def test_actions_relative_to_what_was_seen_come_back_the_same(meaning: str, numbers: list[float], steps: int) -> None:
    """In degrees and relative for the policy, in radians and absolute for the robot; `pending` is the way back."""
    adapter = Adapter(contract("policy", unit="deg", meaning=meaning), contract("robot"))
    state = torch.tensor(numbers, dtype=torch.float64)
    made = torch.linspace(-20, 20, steps * 6, dtype=torch.float64).view(steps, 6)
    actions = adapter.actions(made, state)
    degrees = {"absolute": made, "relative": state.rad2deg() + made, "step": state.rad2deg() + made.cumsum(0)}[meaning]
    torch.testing.assert_close(actions, degrees.deg2rad())
    torch.testing.assert_close(adapter.pending(actions, state), made, atol=1e-9, rtol=0)


def test_turns_are_not_made_relative_by_subtraction() -> None:
    turn = feature("turn", 3, "rotation", "rad", layout="axis_angle")

    def one(meaning: str) -> Contract:
        return Contract(meaning, 20.0, (), (turn,), (Command(turn, "position", meaning, "turn"),))

    with pytest.raises(InputError, match="turns that are relative are not made absolute"):
        Adapter(one("relative"), one("absolute"))


def test_a_command_that_nobody_makes_is_refused() -> None:
    robot = contract("robot")
    renamed = replace(robot, action=(replace(robot.action[0], feature=feature("arm", 6)),))
    with pytest.raises(InputError, match="the policy makes joints, the robot takes arm"):
        Adapter(robot, renamed)
    assert Adapter(robot, renamed, Names(action={"joints": "arm"}))


def test_two_actions_for_one_of_the_robots_are_refused() -> None:
    robot = contract("robot")
    other = replace(robot.action[0], feature=feature("arm", 6))
    with pytest.raises(InputError, match="drive one of the robot's: arm as joints, joints as joints"):
        Adapter(replace(robot, action=(other, *robot.action)), robot, Names(action={"arm": "joints"}))


def test_a_policy_of_another_rate_is_refused() -> None:
    robot = contract("robot")
    with pytest.raises(InputError, match="policy: 50 actions a second, but robot takes 20"):
        Adapter(replace(robot, name="policy", rate=50.0), robot)
