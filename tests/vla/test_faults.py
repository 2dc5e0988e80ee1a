"""Fault injection: thousands of ticks with broken observations, policies and clocks, and not one unsafe command at the robot.

The judge knows nothing of the gate: it looks at what reached the robot, and at when it really did, by the time that passed.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from mmsdk.errors import InputError, SafetyError
from mmsdk.vla.clock import SimulatedClock
from mmsdk.vla.contract import Contract, Timing, Workspace
from mmsdk.vla.envs.planar_arm import PlanarArm, planar_contract, tool
from mmsdk.vla.loop import ControlLoop, Pace
from mmsdk.vla.types import ActionChunk, Observation, Request, Stamp
from mmsdk.vla.worker import Answer, Delayed

HZ = 20.0
BOX = Workspace((-0.2, -0.68, -1.0), (0.68, 0.68, 1.0), speed=0.9)
TIMING = Timing(stale=0.2, frozen=1.0, watchdog=1.0, cooldown=0.5, recover=3)


@dataclass
class FaultyArm:
    """Drops, freezes, delays, reorders and corrupts what the arm says; records what reaches it, and how old what it said really was."""

    arm: PlanarArm
    clock: SimulatedClock
    dice: random.Random
    mode: str = "good"
    left: int = 0
    kept: tuple[float, Observation] | None = None
    history: list[tuple[float, Observation]] = field(default_factory=list)
    given: float = 0.0
    record: list[tuple[float, list[float], float, list[float]]] = field(default_factory=list)

    @property
    def contract(self) -> Contract:
        return self.arm.contract

    def observe(self) -> Observation:
        true = self.arm.observe()
        self.history = [*self.history[-40:], (self.clock.passed, true)]
        if self.left == 0:
            kinds = ["dropped", "frozen", "restamped", "delayed", "reordered", "nan", "huge", "short", "blind", "wild", "future"]
            self.mode = self.dice.choice(kinds) if self.dice.random() < 0.5 else "good"
            self.kept = self.history[-1]
            self.left = self.dice.randint(1, 15) if self.mode != "good" else self.dice.randint(5, 40)
        self.left -= 1
        return self.broken(true)

    def broken(self, true: Observation) -> Observation:
        past, old = self.dice.choice(self.history)
        match self.mode:
            case "dropped":
                raise InputError("no message")
            case "frozen":
                self.given = max(self.given, self.kept[0])
                return self.kept[1]
            case "restamped":
                self.given = self.clock.passed
                return replace(true, images=old.images)
            case "delayed":
                when, late = self.history[max(0, len(self.history) - 1 - self.dice.randint(1, 12))]
                self.given = max(self.given, when)
                return late
            case "reordered":
                self.given = max(self.given, past)
                return old
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
            case "future":
                return replace(true, stamp=Stamp(true.stamp.captured + 5))
        self.given = self.clock.passed
        return true

    def apply(self, action: Tensor) -> None:
        self.record.append((self.clock.passed, action.tolist(), self.clock.passed - self.given, list(self.arm.joints)))
        self.arm.apply(action)


@dataclass
class WildPolicy:
    """Wanders far beyond every limit, and now and then raises or answers with NaN, too few numbers, nothing, or another's stamp."""

    dice: random.Random

    def reset(self, episode: int) -> None:
        self.episode = episode

    def __call__(self, request: Request) -> ActionChunk:
        observation, kind = request.observation, self.dice.random()
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


@dataclass
class LossyWorker:
    """Answers late, by up to four seconds, twice, or in the wrong order."""

    inner: Delayed
    dice: random.Random
    kept: list[Answer] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        return self.inner.busy

    def reset(self, episode: int) -> None:
        self.inner.reset(episode)

    def submit(self, request: Request) -> None:
        self.inner.submit(request)

    def collect(self) -> list[Answer]:
        fresh = self.inner.collect()
        self.kept = [*self.kept, *fresh][-20:]
        again = [self.dice.choice(self.kept)] if self.kept and self.dice.random() < 0.1 else []
        return again + fresh


def latency(dice: random.Random) -> float:
    return 0.03 + 0.1 * dice.random() if dice.random() < 0.9 else dice.uniform(0.5, 4.0)


def broken_run(control: Literal["position", "velocity"], ticks: int, seed: int) -> tuple[ControlLoop, FaultyArm]:
    dice, clock = random.Random(seed), SimulatedClock()
    robot = FaultyArm(PlanarArm(planar_contract(control, HZ, BOX if control == "position" else Workspace(), TIMING), clock), clock, dice)
    policy = WildPolicy(dice)
    loop = ControlLoop(
        robot, policy, HZ, clock=clock, pace=Pace(expert=6, warm_up=0), forward=tool,
        worker=lambda policy: LossyWorker(Delayed(policy, clock, lambda request: latency(dice)), dice),
    )  # fmt: skip
    loop.warm_up()
    for _ in range(ticks):
        loop.wait()
        clock.sleep(dice.uniform(0, 0.01))
        loop.tick()
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
                continue
    loop.settle()
    return loop, robot


def judge(robot: FaultyArm, loop: ControlLoop, control: str) -> list[str]:
    """Everything unsafe among the commands that reached the robot, one line each."""
    period, unsafe, stillness = 1 / HZ, [], 0
    commands = [command for _, command, _, _ in robot.record]
    times = [time for time, _, _, _ in robot.record]
    for k, (_, command, age, joints) in enumerate(robot.record):
        told = f"command {k}: "
        if len(command) != 3 or not torch.tensor(command).isfinite().all():
            unsafe.append(told + f"{command}")
            continue
        if k and times[k] - times[k - 1] < period - 1e-9:
            unsafe.append(told + f"sent {times[k] - times[k - 1]:.4f} s after the last")
        if any(not low - 1e-6 <= joint <= high + 1e-6 for joint, low, high in zip(joints, (-2.5, -2, -2), (2.5, 2, 2), strict=True)):
            unsafe.append(told + f"the arm is at {joints}")
        track = torch.tensor(commands[max(0, k - 3) : k + 1], dtype=torch.float64)
        if control == "position":
            unsafe += [
                told + f"commanded {command}"
                for low, high, c in zip((-2.5, -2, -2), (2.5, 2, 2), command, strict=True)
                if not low <= c <= high
            ]
            # the arm, whose joints lag, cuts corners: two centimetres for it, none for the command
            point, slack = tool(torch.tensor([command, joints], dtype=torch.float64)), torch.tensor([[1e-6], [0.02]])
            if not bool(((point >= torch.tensor(BOX.low) - slack) & (point <= torch.tensor(BOX.high) + slack)).all()):
                unsafe.append(told + f"the tool is sent to {point.tolist()}")
        else:
            track = torch.cat((torch.zeros(1, 3, dtype=torch.float64), track * period)).cumsum(0)[-4:]
        for order, limit in ((1, 1.5), (2, 6.0), (3, 120.0)):
            if len(track) > order:
                value = float((track.diff(n=order, dim=0)[-1] / period**order).abs().max())
                if value > limit * (1 + 1e-6) + 1e-6:
                    unsafe.append(told + f"derivative {order} is {value:.4g}, allowed {limit}")
        moved = k > 0 and (command != commands[k - 1] if control == "position" else any(command))
        stillness = k if age <= TIMING.stale else stillness
        if moved and times[k] - times[stillness] > 1.0:
            unsafe.append(told + f"moves on observations {age:.2f} s old")
    return unsafe


@pytest.mark.parametrize(("control", "seed"), [("position", 0), ("velocity", 1)])
def test_ten_thousand_faulty_ticks_and_no_unsafe_command(control: Literal["position", "velocity"], seed: int) -> None:
    """Five thousand ticks in each mode. That the loop moves at all under this is asserted too: a robot that never moves is safe."""
    loop, robot = broken_run(control, 5_000, seed)
    unsafe = judge(robot, loop, control)
    report = loop.report()
    assert not unsafe, f"{len(unsafe)} unsafe of {len(robot.record)}: {unsafe[:5]}"
    assert report.ticks == 5_000 and len(robot.record) > 4_000
    assert report.deadline_misses > 20 and report.dropped_late > 50 and report.refused_chunks > 20 and report.failed > 5
    assert 0.1 < report.stale_rate < 0.9 and report.held_rate < 0.95 and report.changed_rate > 0.02
