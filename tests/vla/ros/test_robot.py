"""A robot behind ROS topics: everything that reaches it and leaves it goes through ROS's own bytes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import cv2
import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from mmsdk.errors import InputError
from mmsdk.vla.clock import SimulatedClock
from mmsdk.vla.contract import Camera, Command, Contract, Feature, Timing
from mmsdk.vla.envs.planar_arm import PlanarArm, planar_contract
from mmsdk.vla.loop import ControlLoop
from mmsdk.vla.ros.binding import Binding, CameraTopic, CommandTopic, StateTopic
from mmsdk.vla.ros.commands import command_messages
from mmsdk.vla.ros.image import image_message
from mmsdk.vla.ros.messages import Clock, CompressedImage, Header, JointState, Message, Point, Pose, PoseStamped, Quaternion, Time
from mmsdk.vla.ros.robot import RosRobot
from mmsdk.vla.ros.sim_time import SimTime
from mmsdk.vla.ros.stamps import SECOND, time_of
from mmsdk.vla.ros.trajectory import read_trajectory
from mmsdk.vla.types import ActionChunk, Observation, Request, Robot
from mmsdk.vla.worker import Delayed

Heard = Callable[[Message], object]
# a power of two, so that seconds and nanoseconds are the same numbers
HZ = 16.0
JOINTS = ("base", "elbow", "wrist")


@dataclass
class Reach:
    """Moves all joints on by .02 rad an action from where it was asked."""

    def reset(self, episode: int) -> None:
        self.episode = episode

    def __call__(self, request: Request) -> ActionChunk:
        begin = request.pending[0] if len(request.pending) else request.observation.state
        way = 0.02 * torch.arange(1, 13, dtype=torch.float64)[:, None].expand(-1, 3)
        return ActionChunk(begin + way, request.observation.stamp)


@dataclass
class Wire:
    """The arm's own driver: publishes before every observation, and follows the trajectories that come back; all in bytes."""

    arm: PlanarArm
    clock: SimulatedClock
    heard: Heard
    robot: RosRobot = field(init=False)
    sent: list[list[float]] = field(default_factory=list)
    camera: bool = True

    def __post_init__(self) -> None:
        binding = Binding(
            self.arm.contract,
            (CameraTopic("side", "/camera"),),
            (StateTopic("joints", "/joint_states", JOINTS),),
            (CommandTopic("joints", "/arm/joint_trajectory", JOINTS),),
        )
        self.robot = RosRobot(binding, self.clock, self._follow, "reach")

    @property
    def contract(self) -> Contract:
        return self.robot.contract

    def observe(self) -> Observation:
        seen = self.arm.observe()
        header = Header(time_of(round(seen.stamp.captured * SECOND)))
        if self.camera:
            pixels = seen.images["side"].pixels.permute(1, 2, 0).numpy()[..., ::-1]
            self.robot.take("/camera", self.heard(image_message(pixels, "bgr8", header, 100)))
        position = seen.state.tolist()
        state = JointState(header, ("wrist", "finger", "base", "elbow"), (position[2], 9.0, position[0], position[1]))
        self.robot.take("/joint_states", self.heard(state))
        return self.robot.observe()

    def apply(self, action: torch.Tensor) -> None:
        self.robot.apply(action)

    def _follow(self, topic: str, message: Message) -> None:
        assert topic == "/arm/joint_trajectory"
        targets = read_trajectory(self.heard(message), JOINTS, round(self.clock.now() * SECOND))
        assert targets.times.tolist() == [1 / HZ]
        self.sent.append(targets.values[0].tolist())
        self.arm.apply(targets.values[0])


def looped(wire: Callable[[PlanarArm, SimulatedClock], Robot], timing: Timing = Timing()) -> tuple[ControlLoop, PlanarArm, Robot]:
    clock = SimulatedClock(1024.0)
    arm = PlanarArm(planar_contract("position", HZ, timing=timing), clock)
    robot = wire(arm, clock)
    loop = ControlLoop(robot, Reach(), HZ, clock=clock, worker=lambda policy: Delayed(policy, clock, lambda request: 0.06))
    return loop, arm, robot


def test_the_loop_over_topics_does_what_the_loop_beside_the_arm_does(heard: Heard) -> None:
    """Bit for bit: pictures in bgr8 with padded rows, joints in another order, commands as trajectories."""
    direct, near, _ = looped(lambda arm, clock: arm)
    over, far, wire = looped(lambda arm, clock: Wire(arm, clock, heard))
    assert isinstance(wire, Robot) and isinstance(wire.robot, Robot)
    reports = [loop.run(60) for loop in (direct, over)]
    assert far.joints == near.joints and far.joints[0] > 1.0 and len(wire.sent) > 50
    assert replace(reports[0], jitter_ms=reports[1].jitter_ms, busy_ms=reports[1].busy_ms) == reports[1]
    assert reports[1].held_rate < 0.2 and reports[1].stale_rate == 0


def test_vr_34_a_camera_that_stops_holds_the_arm_within_a_period_of_the_deadline(heard: Heard) -> None:
    loop, _, wire = looped(lambda arm, clock: Wire(arm, clock, heard), Timing(stale=0.25))
    loop.warm_up()
    ticks = []
    for number in range(60):
        wire.camera = number < 30
        loop.wait()
        ticks.append(loop.tick())
    assert not ticks[29].held and not ticks[33].held
    # the last picture is of tick 29: at tick 33 it is .25 s old, at tick 34 older, and with it the observation
    assert ticks[34].held.startswith("stale: ") and "0.312 s old" in ticks[34].held and all(tick.held for tick in ticks[34:])
    resting = [tick.command.tolist() for tick in ticks[-10:]]
    assert all(command == resting[0] for command in resting) and resting[0] != [0.0, 0.0, 0.0]


def feature(name: str, kind: str, size: int, unit: str, **more: object) -> Feature:
    return Feature(name, kind, size, unit, (-1e6,) * size, (1e6,) * size, **more)


ARM = feature("arm", "joint", 2, "deg")
HAND = feature("hand", "gripper", 1, "mm", opened=80.0, closed=0.0)
PLACE = feature("place", "position", 3, "cm")
TURN = feature("turn", "rotation", 3, "deg", layout="euler_xyz")
SPEED = feature("speed", "velocity", 2, "rad/s")
ROLLING, TURNING = feature("rolling", "velocity", 1, "m/s"), feature("turning", "velocity", 1, "deg/s")
ROBOT = Contract(
    "mobile arm",
    20.0,
    (Camera("front", 4, 6, "bgr", "hwc", 180), Camera("hand", 4, 6, "rgb", "chw")),
    (ARM, HAND, PLACE, TURN, SPEED),
    (
        Command(ARM, "position", "absolute", "arm"),
        Command(HAND, "position", "absolute", "hand"),
        Command(ROLLING, "velocity", "absolute"),
        Command(TURNING, "velocity", "absolute"),
    ),
)
BINDING = Binding(
    ROBOT,
    (CameraTopic("front", "/front"), CameraTopic("hand", "/hand/compressed", True)),
    (
        StateTopic("arm", "/joint_states", ("shoulder", "elbow")),
        StateTopic("hand", "/joint_states", ("finger",)),
        StateTopic("place", "/tool"),
        StateTopic("turn", "/tool"),
        StateTopic("speed", "/joint_states", ("shoulder", "elbow")),
    ),
    (
        CommandTopic("arm", "/arm/joint_trajectory", ("shoulder", "elbow")),
        CommandTopic("hand", "/arm/joint_trajectory", ("finger",)),
        CommandTopic("rolling", "/cmd_vel", ("linear.x",), "TwistStamped"),
        CommandTopic("turning", "/cmd_vel", ("angular.z",), "TwistStamped"),
    ),
)


def robot(binding: Binding = BINDING, sent: list[tuple[str, object]] | None = None) -> RosRobot:
    kept = [] if sent is None else sent
    return RosRobot(binding, SimulatedClock(50.5), lambda topic, message: kept.append((topic, message)), "do it")


def header(milliseconds: int) -> Header:
    return Header(time_of(milliseconds * SECOND // 1000), "base")


def front(at: int, encoding: str = "bgr8") -> Message:
    pixels = np.zeros((4, 6, 3), np.uint8)
    pixels[0, 0] = (1, 2, 3) if encoding != "rgb8" else (3, 2, 1)
    return image_message(pixels, encoding, header(at), 25)


def hand(at: int) -> Message:
    return CompressedImage(
        header(at), "bgr8; png compressed bgr8", cv2.imencode(".png", np.full((4, 6, 3), (1, 2, 3), np.uint8))[1].tobytes()
    )


def joints(at: int) -> Message:
    return JointState(header(at), ("finger", "elbow", "shoulder"), (0.04, -math.pi / 2, math.pi / 6), (0.0, 0.5, -0.25))


def tool(at: int) -> Message:
    x, y, z, w = Rotation.from_euler("xyz", [10, 20, 30], degrees=True).as_quat().tolist()
    return PoseStamped(header(at), Pose(Point(0.1, 0.2, 0.3), Quaternion(x, y, z, w)))


def filled(heard: Heard, binding: Binding = BINDING) -> RosRobot:
    found = robot(binding)
    for topic, message in (("/front", front(50_000)), ("/hand/compressed", hand(50_020)), ("/joint_states", joints(50_030))):
        found.take(topic, heard(message))
    found.take("/tool", heard(tool(50_010)))
    return found


def test_messages_become_an_observation_in_the_contracts_units(heard: Heard) -> None:
    seen = filled(heard).observe()
    expected = [30.0, -90.0, 40.0, 10.0, 20.0, 30.0, 10.0, 20.0, 30.0, -0.25, 0.5]
    torch.testing.assert_close(seen.state, torch.tensor(expected, dtype=torch.float64))
    assert seen.instruction == "do it" and seen.stamp.captured == 50.0
    assert dict(seen.captured) == {"front": 50.0, "hand": 50.02, "state": 50.01}
    # the camera stands upside down: its first pixel is the last
    assert seen.images["front"].pixels[:, -1, -1].tolist() == [3, 2, 1] and int(seen.images["front"].pixels.sum()) == 6
    assert seen.images["hand"].pixels[:, 0, 0].tolist() == [3, 2, 1]


@pytest.mark.parametrize("encoding", ["rgb8", "bgr8", "8UC3"])
def test_vr_20_the_message_tells_the_colours_and_else_the_contract(encoding: str, heard: Heard) -> None:
    found = filled(heard)
    found.take("/front", heard(front(50_100, encoding)))
    assert found.observe().images["front"].pixels[:, -1, -1].tolist() == [3, 2, 1]


def test_actions_become_one_message_a_topic(heard: Heard) -> None:
    sent: list[tuple[str, object]] = []
    robot(sent=sent).apply(torch.tensor([180.0, -90.0, 80.0, 0.5, 90.0]))
    (first, trajectory), (second, twist) = [(topic, heard(message)) for topic, message in sent]
    assert (first, second) == ("/arm/joint_trajectory", "/cmd_vel")
    assert list(trajectory.joint_names) == ["shoulder", "elbow", "finger"] and trajectory.header.stamp.sec == 0
    np.testing.assert_allclose(trajectory.points[0].positions, [math.pi, -math.pi / 2, 0.08])
    assert trajectory.points[0].time_from_start.nanosec == 50_000_000
    assert (twist.twist.linear.x, twist.header.stamp.sec, twist.header.stamp.nanosec) == (0.5, 50, 500_000_000)
    assert twist.twist.angular.z == pytest.approx(math.pi / 2)


def test_vr_07_short_actions_send_nothing() -> None:
    sent: list[tuple[str, object]] = []
    found = robot(sent=sent)
    with pytest.raises(InputError, match="actions of 4 numbers, expected 5; none is made up"):
        found.apply(torch.zeros(4))
    for bad in (float("nan"), float("inf")):
        with pytest.raises(InputError, match="finite"):
            found.apply(torch.tensor([0.0, 0.0, 0.0, 0.0, bad]))
    assert not sent
    with pytest.raises(InputError, match="2 actions in a TwistStamped, which holds one"):
        command_messages(BINDING, torch.zeros(2, 5), Time())


def test_what_has_not_been_heard_is_named(heard: Heard) -> None:
    found = robot()
    found.take("/tool", heard(tool(50_010)))
    with pytest.raises(InputError, match="mobile arm: nothing has been heard on /front, /hand/compressed, /joint_states"):
        found.observe()
    found.take("/joint_states", heard(JointState(header(50_000), ("wheel",), (1.0,))))
    with pytest.raises(InputError, match="/joint_states"):
        found.observe()


def test_messages_that_cannot_be_used_leave_what_was_there(heard: Heard) -> None:
    found = filled(heard)
    before = found.observe()
    cases = {
        "/other: is not asked for": ("/other", tool(50_200)),
        "/front: a .*JointState, expected an Image": ("/front", joints(50_200)),
        "/joint_states: a .*, expected a JointState": ("/joint_states", tool(50_200)),
        "/tool: a .*, expected a PoseStamped": ("/tool", joints(50_200)),
        "/hand/compressed: a .*, expected a CompressedImage": ("/hand/compressed", front(50_200)),
        "/front: is not stamped": ("/front", front(0)),
        "/front: .* bytes of data": ("/front", replace(front(50_200), data=b"\0")),
        "camera front: a frame of": ("/front", image_message(np.zeros((5, 6, 3), np.uint8), "rgb8", header(50_200))),
        "/tool: the quaternion": ("/tool", PoseStamped(header(50_200), Pose(Point(), Quaternion(w=0.5)))),
        "joint state: the position of finger is not finite": (
            "/joint_states",
            replace(joints(50_200), position=(float("nan"), 0.0, 0.0)),
        ),
    }
    for told, (topic, message) in cases.items():
        with pytest.raises(InputError, match=told):
            found.take(topic, heard(message))
    after = found.observe()
    assert torch.equal(after.state, before.state) and after.captured == before.captured


def test_late_messages_change_nothing(heard: Heard) -> None:
    found = filled(heard)
    found.take("/tool", heard(replace(tool(49_000), pose=Pose(Point(9.0, 9.0, 9.0)))))
    assert found.observe().state[3:6].tolist() == pytest.approx([10.0, 20.0, 30.0])


def test_parts_are_put_together_within_the_slop(heard: Heard) -> None:
    found = robot(replace(BINDING, slop=0.015))
    with pytest.raises(InputError, match="nothing has been put together yet of /front"):
        filled(heard, replace(BINDING, slop=0.015)).observe()
    for topic, message in (("/front", front(50_000)), ("/hand/compressed", hand(50_005)), ("/tool", tool(50_010))):
        found.take(topic, heard(message))
    found.take("/joint_states", heard(joints(50_014)))
    assert dict(found.observe().captured) == {"front": 50.0, "hand": 50.005, "state": 50.01}
    # the next picture alone is no observation: the set before it stays
    found.take("/front", heard(front(50_100)))
    assert found.observe().stamp.captured == 50.0


def test_a_simulation_that_starts_anew_is_observed_anew(heard: Heard) -> None:
    found = filled(heard)
    clock = SimTime([found.clear])
    clock.take(Clock(Time(51, 0)))
    assert found.observe().stamp.captured == 50.0
    clock.take(Clock(Time(1, 0)))
    with pytest.raises(InputError, match="nothing has been heard on"):
        found.observe()
    found.take("/joint_states", heard(JointState(header(1_000), ("finger",), (0.01,), (0.0,))))
    with pytest.raises(InputError, match="/joint_states"):
        found.observe()


def test_a_set_that_late_messages_complete_is_not_gone_back_to(heard: Heard) -> None:
    eye = Contract("eye", 20.0, ROBOT.cameras[:1], (PLACE, TURN), ROBOT.action[2:3])
    found = robot(Binding(eye, BINDING.cameras[:1], BINDING.state[2:4], BINDING.commands[2:3], slop=0.015))
    for at in (50_100, 50_000):
        found.take("/front", heard(front(at)))
        found.take("/tool", heard(tool(at)))
    assert found.observe().stamp.captured == 50.1
