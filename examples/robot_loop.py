"""A robot's control loop in simulation: a policy that asks for too much, and the safety gate that has the last word.

The policy wants a joint to jump by half a radian a step, which is 10 rad/s at 20 Hz. The arm's contract allows 1.5 rad/s, 6 rad/s^2 and
120 rad/s^3, and every command keeps to that. In the middle somebody presses the emergency stop.
"""

from itertools import pairwise

from mmsdk.vla.clock import SimulatedClock
from mmsdk.vla.envs.planar_arm import PlanarArm, planar_contract
from mmsdk.vla.loop import ControlLoop
from mmsdk.vla.types import ActionChunk, Request
from mmsdk.vla.worker import Delayed

HZ = 20.0


class Jump:
    """Far too fast: each of its eight actions is half a radian beyond the one before."""

    def reset(self, episode: int) -> None:
        """It remembers nothing."""

    def __call__(self, request: Request) -> ActionChunk:
        """A chunk from where the arm was seen."""
        state = request.observation.state
        steps = state.new_tensor([[0.5 * step, 0.0, 0.0] for step in range(1, 9)])
        return ActionChunk(state + steps, request.observation.stamp, "jump")


clock = SimulatedClock()
arm = PlanarArm(planar_contract("position", HZ), clock)
loop = ControlLoop(arm, Jump(), hz=HZ, clock=clock, worker=lambda policy: Delayed(policy, clock, lambda request: 0.05))
loop.warm_up()
commands = []
for number in range(60):
    loop.wait()
    tick = loop.tick()
    commands.append(float(tick.command[0]) if tick.command is not None else arm.joints[0])
    if number == 40:
        loop.estop.trip("somebody pressed it", clock.now())
loop.settle()
fastest = max(abs(after - before) * HZ for before, after in pairwise(commands))
print(f"asked for {0.5 * HZ:.0f} rad/s, sent at most {fastest:.2f} rad/s; after the stop: {tick.held}")
print(loop.report())
assert fastest <= 1.5 + 1e-6
