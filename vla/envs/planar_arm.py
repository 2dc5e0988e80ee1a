"""An arm of three joints in a plane, seen by one camera: kinematics and a lag, exact between commands, by a simulated clock.

Each joint follows its commanded position with a first-order lag, or moves at its commanded velocity until its dead-man stops it. Small
enough to run thousands of ticks a second, real enough that a command that should not have been sent shows where the arm ends up.
"""

from math import exp
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vision.types import Image
from mmsdk.vla.clock import SimulatedClock
from mmsdk.vla.contract import Camera, Command, Contract, Feature, Timing, Workspace
from mmsdk.vla.types import Observation, Stamp

__all__ = ["PlanarArm", "planar_contract", "tool"]

LINKS = (0.3, 0.25, 0.15)
PIXELS = 24
_THICK = 0.04


def planar_contract(
    control: Literal["position", "velocity"], rate: float = 20.0, workspace: Workspace = Workspace(), timing: Timing = Timing()
) -> Contract:
    """The arm's contract: 3 joints in rad, at most 1.5 rad/s, 6 rad/s^2 and 120 rad/s^3; commanded by position or by velocity."""
    low, high = (-2.5, -2.0, -2.0), (2.5, 2.0, 2.0)
    joints = Feature("joints", "joint", 3, "rad", low, high)
    speeds = Feature("joints", "velocity", 3, "rad/s", (-1.5,) * 3, (1.5,) * 3)
    command = Command(
        joints if control == "position" else speeds, control, "absolute", "joints", speed=1.5, acceleration=6.0, jerk=120.0, lag=0.5
    )
    return Contract("planar arm", rate, (Camera("side", PIXELS, PIXELS, "rgb", "hwc"),), (joints,), (command,), workspace, timing)


def tool(joints: Float[Tensor, "n 3"]) -> Float[Tensor, "n 3"]:
    """Forward kinematics: where the tip is, in metres of the base; the arm moves in the plane z = 0."""
    angles = joints.cumsum(dim=-1)
    lengths = joints.new_tensor(LINKS)
    x, y = (torch.cos(angles) * lengths).sum(-1), (torch.sin(angles) * lengths).sum(-1)
    return torch.stack((x, y, torch.zeros_like(x)), dim=-1)


class PlanarArm:
    """Starts at `joints`, at rest. `instruction` is what its observations say is to be done."""

    def __init__(
        self,
        contract: Contract,
        clock: SimulatedClock,
        joints: tuple[float, float, float] = (0.4, 0.6, 0.5),
        lag: float = 0.05,
        deadman: float = 0.15,
        instruction: str = "reach",
    ) -> None:
        """`lag` is the time constant with which joints follow positions, `deadman` how long a velocity holds, both in seconds.

        Raises InputError for another contract.
        """
        if contract.action_size != 3 or contract.state_size != 3 or contract.action[0].control == "effort":
            raise InputError("expected three joints by position or velocity; see planar_contract", item=contract.name)
        self._contract, self._clock, self._instruction = contract, clock, instruction
        self._lag, self._deadman, self._alive = lag, deadman, 0.0
        self.joints = list(joints)
        self._follows = contract.action[0].control == "position"
        self._command = list(joints) if self._follows else [0.0, 0.0, 0.0]
        self._moved = clock.passed

    @property
    def contract(self) -> Contract:
        """See `Robot`."""
        return self._contract

    def observe(self) -> Observation:
        """See `Robot`: always of this very moment."""
        self._move()
        state = torch.tensor(self.joints, dtype=torch.float64)
        return Observation({"side": Image(_picture(state), "side")}, state, self._instruction, Stamp(self._clock.now()))

    def apply(self, action: Float[Tensor, " a"]) -> None:
        """See `Robot`. The arm itself checks nothing."""
        self._move()
        self._command, self._alive = action.tolist(), self._deadman

    def _move(self) -> None:
        """Bring the joints up to now."""
        passed, self._moved = self._clock.passed - self._moved, self._clock.passed
        if not self._follows:
            moving = min(passed, self._alive)
            self._alive -= moving
            self.joints = [joint + speed * moving for joint, speed in zip(self.joints, self._command, strict=True)]
            return
        left = exp(-passed / self._lag) if self._lag else 0.0
        self.joints = [target + (joint - target) * left for joint, target in zip(self.joints, self._command, strict=True)]


def _picture(joints: Tensor) -> Tensor:
    """The arm's three links in red, green and blue, a metre and a half of its plane around the base."""
    angles = joints.cumsum(dim=-1)
    steps = torch.stack((torch.cos(angles), torch.sin(angles)), dim=-1) * joints.new_tensor(LINKS)[:, None]
    ends = steps.cumsum(dim=0)
    starts = ends - steps
    grid = torch.linspace(-0.75, 0.75, PIXELS, dtype=joints.dtype)
    points = torch.stack(torch.meshgrid(grid, -grid, indexing="xy"), dim=-1)
    # distance of every pixel to every link
    along = (((points[None] - starts[:, None, None]) * steps[:, None, None]).sum(-1) / (steps**2).sum(-1)[:, None, None]).clamp(0, 1)
    nearest = starts[:, None, None] + along[..., None] * steps[:, None, None]
    distance: Tensor = torch.linalg.vector_norm(points[None] - nearest, dim=-1)
    return ((1 - distance / _THICK).clamp(0, 1) * 255).to(torch.uint8)
