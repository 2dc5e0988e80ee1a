"""Fault injection: a simulated arm whose observations, policy, answers and clock are broken on purpose, and a judge of what reached it.

The judge knows nothing of the gate: it looks at what reached the arm, and at when it really did, by the time that passed.
"""

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from mmsdk.errors import InputError, SafetyError
from mmsdk.vla.clock import SimulatedClock
from mmsdk.vla.contract import Contract, Timing, Workspace
from mmsdk.vla.envs.planar_arm import PlanarArm, planar_contract, tool
from mmsdk.vla.loop import ControlLoop, Pace
from mmsdk.vla.types import ActionChunk, Observation, Policy, Request, Stamp
from mmsdk.vla.worker import Answer, Delayed, Worker

__all__ = ["CONTROLS", "FAULTS", "Control", "Faults", "FaultyArm", "broken_run", "judge"]

Control = Literal["position", "velocity"]
CONTROLS: tuple[Control, ...] = ("position", "velocity")

HZ = 20.0
BOX = Workspace((-0.2, -0.68, -1.0), (0.68, 0.68, 1.0), speed=0.9)
TIMING = Timing(stale=0.2, frozen=1.0, watchdog=1.0, cooldown=0.5, recover=3)
_CORRUPT = ("nan", "huge", "short", "blind", "wild", "future")
_PATIENCE = 1.0
"""Seconds after the last fresh observation in which the arm may still be coming to rest."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong: how observations are broken, whether the policy errs, whether answers are late or lost, and all else."""

    seen: tuple[str, ...] = ()
    policy: bool = False
    answers: bool = False
    """Up to four seconds late, twice, or in the wrong order."""
    clock: bool = False
    """It jumps; ticks take too long; somebody presses the emergency stop, or begins anew."""


FAULTS: Mapping[str, Faults] = MappingProxyType(
    {
        "none": Faults(),
        "dropped": Faults(("dropped",)),
        "frozen": Faults(("frozen", "restamped")),
        "delayed": Faults(("delayed",)),
        "reordered": Faults(("reordered",)),
        "corrupt": Faults(_CORRUPT),
        "policy errs": Faults(policy=True),
        "policy hangs": Faults(answers=True),
        "clock jumps": Faults(clock=True),
        "everything": Faults(("dropped", "frozen", "restamped", "delayed", "reordered", *_CORRUPT), True, True, True),
    }
)


@dataclass(slots=True)
class FaultyArm:
    """Drops, freezes, delays, reorders and corrupts what the arm says; records what reaches it, and how old what it said really was."""

    arm: PlanarArm
    clock: SimulatedClock
    dice: random.Random
    kinds: tuple[str, ...]
    mode: str = "good"
    left: int = 0
    kept: tuple[float, Observation] | None = None
    history: list[tuple[float, Observation]] = field(default_factory=list)
    given: float = 0.0
    record: list[tuple[float, list[float], float, list[float]]] = field(default_factory=list)

    @property
    def contract(self) -> Contract:
        """See `Robot`."""
        return self.arm.contract

    def observe(self) -> Observation:
        """See `Robot`: what the arm says, or what became of it."""
        true = self.arm.observe()
        self.history = [*self.history[-40:], (self.clock.passed, true)]
        if self.left == 0:
            self.mode = self.dice.choice(self.kinds) if self.kinds and self.dice.random() < 0.5 else "good"
            self.kept = self.history[-1]
            self.left = self.dice.randint(1, 15) if self.mode != "good" else self.dice.randint(5, 40)
        self.left -= 1
        return self._broken(true)

    def _broken(self, true: Observation) -> Observation:
        if self.mode == "dropped":
            raise InputError("no message")
        if self.mode in _CORRUPT:
            return self._corrupt(true)
        when, said = self._late()
        if self.mode == "restamped":
            # the arm is felt, the picture stands still
            when, said = self.clock.passed, replace(true, images=said.images)
        elif self.mode == "good":
            when, said = self.clock.passed, true
        self.given = max(self.given, when)
        return said

    def _late(self) -> tuple[float, Observation]:
        """Something that was said before."""
        if self.mode == "frozen":
            assert self.kept is not None, "something was said when it froze"
            return self.kept
        if self.mode == "delayed":
            return self.history[max(0, len(self.history) - 1 - self.dice.randint(1, 12))]
        return self.dice.choice(self.history)

    def _corrupt(self, true: Observation) -> Observation:
        match self.mode:
            case "nan":
                return replace(true, state=true.state * float("nan"))
            case "huge":
                return replace(true, state=true.state + 1e6)
            case "short":
                return replace(true, state=true.state[:2])
            case "blind":
                return replace(true, images={})
            case "wild":
                return replace(true, state=torch.tensor([self.dice.uniform(-2, 2) for _ in range(3)], dtype=torch.float64))
        return replace(true, stamp=Stamp(true.stamp.captured + 5))

    def apply(self, action: Tensor) -> None:
        """See `Robot`."""
        self.record.append((self.clock.passed, action.tolist(), self.clock.passed - self.given, list(self.arm.joints)))
        self.arm.apply(action)


@dataclass(slots=True)
class WildPolicy:
    """Wanders far beyond every limit; where it `errs` it also raises, or answers with NaN, too few numbers, nothing, another's stamp."""

    dice: random.Random
    errs: bool

    def reset(self, episode: int) -> None:
        """See `Policy`."""

    def __call__(self, request: Request) -> ActionChunk:
        """See `Policy`."""
        observation, kind = request.observation, self.dice.random() if self.errs else 0.5
        if kind < 0.05:
            raise RuntimeError("out of memory")
        steps, scale = self.dice.randint(1, 30), self.dice.choice([0.02, 0.1, 1.0, 50.0])
        noise = torch.tensor([[self.dice.gauss(0, scale) for _ in range(3)] for _ in range(steps)], dtype=torch.float64)
        actions = observation.state + noise.cumsum(0) if self.dice.random() < 0.7 else noise * 20
        if kind < 0.10:
            actions[self.dice.randrange(steps)] = float(self.dice.choice(["nan", "inf"]))
        elif kind < 0.15:
            actions = actions[:, :2]
        elif kind < 0.18:
            actions = actions[:0]
        stamp = replace(observation.stamp, request=observation.stamp.request - 1) if kind > 0.95 else observation.stamp
        return ActionChunk(actions, stamp)


@dataclass(slots=True)
class LossyWorker:
    """Hands answers over twice, or in the wrong order; how late they are, `inner` knows."""

    inner: Delayed
    dice: random.Random
    kept: list[Answer] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """See `Worker`."""
        return self.inner.busy

    def reset(self, episode: int) -> None:
        """See `Worker`."""
        self.inner.reset(episode)

    def submit(self, request: Request) -> None:
        """See `Worker`."""
        self.inner.submit(request)

    def collect(self) -> list[Answer]:
        """See `Worker`."""
        fresh = self.inner.collect()
        self.kept = [*self.kept, *fresh][-20:]
        again = [self.dice.choice(self.kept)] if self.kept and self.dice.random() < 0.1 else []
        return again + fresh


def broken_run(control: Control, faults: Faults, ticks: int, seed: int) -> tuple[ControlLoop, FaultyArm, list[float]]:
    """So many ticks under these faults, in simulated time: the loop, the arm with what reached it, the seconds that ticks really took."""
    dice, clock, took = random.Random(seed), SimulatedClock(), list[float]()
    arm = PlanarArm(planar_contract(control, HZ, BOX if control == "position" else Workspace(), TIMING), clock)
    robot = FaultyArm(arm, clock, dice, faults.seen)

    def latency(request: Request) -> float:
        return dice.uniform(0.5, 4.0) if faults.answers and dice.random() >= 0.9 else 0.03 + 0.1 * dice.random()

    def worker(policy: Policy) -> Worker:
        delayed = Delayed(policy, clock, latency)
        return LossyWorker(delayed, dice) if faults.answers else delayed

    loop = ControlLoop(robot, WildPolicy(dice, faults.policy), HZ, clock=clock, pace=Pace(expert=6, warm_up=0), forward=tool, worker=worker)
    loop.warm_up()
    for _ in range(ticks):
        loop.wait()
        clock.sleep(dice.uniform(0, 0.01) if faults.clock else 0.0)
        begun = time.perf_counter()
        loop.tick()
        took.append(time.perf_counter() - begun)
        if faults.clock:
            _disturbed(loop, clock, dice)
    loop.settle()
    return loop, robot, took


def _disturbed(loop: ControlLoop, clock: SimulatedClock, dice: random.Random) -> None:
    """What comes from outside between two ticks."""
    clock.sleep(dice.uniform(0, 0.03) if dice.random() < 0.97 else dice.uniform(0.05, 0.4))
    chance = dice.random()
    if chance < 0.004:
        clock.jump(dice.choice([-30.0, -1.0, -0.3, 0.3, 1.0, 30.0]))
    elif chance < 0.008:
        loop.estop.trip("a person pressed it", clock.now())
    elif chance < 0.011:
        loop.reset()
    if loop.estop.reason and dice.random() < 0.1:
        try:
            loop.release()
        except SafetyError:
            return


def judge(robot: FaultyArm, control: Control) -> list[str]:
    """Everything unsafe among the commands that reached the robot, one line each."""
    period, unsafe, stillness = 1 / HZ, list[str](), 0
    commands, times = [command for _, command, _, _ in robot.record], [moment for moment, _, _, _ in robot.record]
    for k, (_, command, age, joints) in enumerate(robot.record):
        told = f"command {k}: "
        if len(command) != 3 or not torch.tensor(command).isfinite().all():
            unsafe.append(told + f"{command}")
            continue
        if k and times[k] - times[k - 1] < period - 1e-9:
            unsafe.append(told + f"sent {times[k] - times[k - 1]:.4f} s after the last")
        unsafe += [told + line for line in _misplaced(command, joints, control)]
        track = torch.tensor(commands[max(0, k - 3) : k + 1], dtype=torch.float64)
        if control == "velocity":
            track = torch.cat((torch.zeros(1, 3, dtype=torch.float64), track * period)).cumsum(0)[-4:]
        for order, limit in ((1, 1.5), (2, 6.0), (3, 120.0)):
            if len(track) > order:
                value = float((track.diff(n=order, dim=0)[-1] / period**order).abs().max())
                if value > limit * (1 + 1e-6) + 1e-6:
                    unsafe.append(told + f"derivative {order} is {value:.4g}, allowed {limit}")
        moved = k > 0 and (command != commands[k - 1] if control == "position" else any(command))
        stillness = k if age <= TIMING.stale else stillness
        if moved and times[k] - times[stillness] > _PATIENCE:
            unsafe.append(told + f"moves on observations {age:.2f} s old")
    return unsafe


def _misplaced(command: list[float], joints: list[float], control: Control) -> list[str]:
    """What of the arm and of where it is sent is outside its range or its workspace."""
    low, high = (-2.5, -2.0, -2.0), (2.5, 2.0, 2.0)
    found = [f"the arm is at {joints}"] if any(not a - 1e-6 <= x <= b + 1e-6 for x, a, b in zip(joints, low, high, strict=True)) else []
    if control == "velocity":
        return found
    found += [f"commanded {command}" for x, a, b in zip(command, low, high, strict=True) if not a <= x <= b]
    # the arm, whose joints lag, cuts corners: two centimetres for it, none for the command
    point, slack = tool(torch.tensor([command, joints], dtype=torch.float64)), torch.tensor([[1e-6], [0.02]])
    if not bool(((point >= torch.tensor(BOX.low) - slack) & (point <= torch.tensor(BOX.high) + slack)).all()):
        found.append(f"the tool is sent to {point.tolist()}")
    return found
