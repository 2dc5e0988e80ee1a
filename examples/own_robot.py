"""One's own robot in one file: what its numbers mean, a driver with two methods, a policy, and the loop that runs one by the other.

`Motors` stands for what talks to the hardware; put yours in its place, and correct the contract. No method of a driver may block: a real
one keeps the newest picture and state that came in, and the moment at which they were taken.
"""

import torch
from torch import Tensor

from mmsdk.vision.types import Image
from mmsdk.vla.clock import SystemClock
from mmsdk.vla.contract import Camera, Command, Contract, Feature
from mmsdk.vla.loop import ControlLoop
from mmsdk.vla.types import ActionChunk, Observation, Request, Stamp

# two joints in rad and a gripper that is open at 0.08 m, commanded by position at 20 Hz, within these limits whatever a policy wants
joints = Feature("joints", "joint", 2, "rad", (-1.5, -1.5), (1.5, 1.5))
hand = Feature("hand", "gripper", 1, "m", (0.0,), (0.08,), opened=0.08, closed=0.0)
CONTRACT = Contract(
    "my arm",
    20.0,
    (Camera("front", 48, 64, "rgb", "hwc"),),
    (joints, hand),
    (
        Command(joints, "position", "absolute", "joints", speed=1.0, acceleration=4.0, jerk=80.0, lag=0.3),
        Command(hand, "position", "absolute", "hand", speed=0.2),
    ),
)


class Motors:
    """The hardware, or nearly: it goes where it is sent."""

    def __init__(self) -> None:
        self.positions = torch.tensor([0.0, 0.3, 0.08], dtype=torch.float64)

    def frame(self) -> Tensor:
        """What the camera sees: 3 x 48 x 64 bytes."""
        return (torch.full((3, 48, 64), 90.0) + 40 * float(self.positions[0])).to(torch.uint8)


class MyArm:
    """The driver: a `mmsdk.vla.types.Robot`."""

    contract = CONTRACT

    def __init__(self) -> None:
        self.motors, self.clock = Motors(), SystemClock()

    def observe(self) -> Observation:
        """The newest picture and state, and when they were taken, by the clock of the loop."""
        images = {"front": Image(self.motors.frame(), "front")}
        return Observation(images, self.motors.positions.clone(), "wave", Stamp(self.clock.now()))

    def apply(self, action: Tensor) -> None:
        """Send one command. It has been through the safety gate."""
        self.motors.positions = action.clone()


class Wave:
    """A policy; put `load_policy(...)`, `RemotePolicy(...)` or `default_policy(robot)` in its place."""

    def reset(self, episode: int) -> None:
        """It remembers nothing."""

    def __call__(self, request: Request) -> ActionChunk:
        """Eight actions of three numbers, the first due when the observation was taken. Faster than the arm may go."""
        state, steps = request.observation.state, torch.arange(1, 9, dtype=torch.float64)
        joint = torch.stack((state[0] + 0.2 * steps, state[1].expand(8), torch.full((8,), 0.02, dtype=torch.float64)), dim=1)
        return ActionChunk(joint.clamp(-1.5, 1.5), request.observation.stamp, "wave")


robot = MyArm()
report = ControlLoop(robot, Wave(), hz=20.0, clock=robot.clock).run(ticks=20)
print(report)
print("the arm is at", [round(value, 2) for value in robot.motors.positions.tolist()])
assert report.changed_rate > 0, "the policy asks for more than the contract allows"
