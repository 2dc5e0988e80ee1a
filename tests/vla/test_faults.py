"""Fault injection: thousands of ticks with broken observations, policies and clocks, and not one unsafe command at the robot."""

import random

import pytest
import torch

from mmsdk.apps.robots.faults import BOX, CONTROLS, FAULTS, HZ, TIMING, Control, FaultyArm, broken_run, judge
from mmsdk.vla.clock import SimulatedClock
from mmsdk.vla.contract import Workspace
from mmsdk.vla.envs.planar_arm import PlanarArm, planar_contract


@pytest.mark.parametrize(("control", "seed"), [("position", 0), ("velocity", 3)])
def test_ten_thousand_faulty_ticks_and_no_unsafe_command(control: Control, seed: int) -> None:
    """Five thousand ticks in each mode. That the loop moves at all under this is asserted too: a robot that never moves is safe."""
    loop, robot, _ = broken_run(control, FAULTS["everything"], 5_000, seed)
    unsafe = judge(robot, control)
    report = loop.report()
    assert not unsafe, f"{len(unsafe)} unsafe of {len(robot.record)}: {unsafe[:5]}"
    assert report.ticks == 5_000 and len(robot.record) > 4_000
    assert report.deadline_misses > 20 and report.dropped_late > 50 and report.refused_chunks > 20 and report.failed > 5
    assert 0.1 < report.stale_rate < 0.9 and report.held_rate < 0.95 and report.changed_rate > 0.02


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "everything"])
def test_each_fault_by_itself_leads_to_no_unsafe_command(fault: str) -> None:
    for control in CONTROLS:
        loop, robot, took = broken_run(control, FAULTS[fault], 200, seed=2)
        assert judge(robot, control) == [] and loop.report().held_rate < 0.9 and len(took) == 200


def recorded(control: Control, commands: list[list[float]], gap: float = 1 / HZ) -> FaultyArm:
    """An arm that these commands reached, none of them through a gate."""
    clock = SimulatedClock()
    box = BOX if control == "position" else Workspace()
    robot = FaultyArm(PlanarArm(planar_contract(control, HZ, box, TIMING), clock), clock, random.Random(0), ())
    for command in commands:
        robot.observe()
        robot.apply(torch.tensor(command, dtype=torch.float64))
        clock.sleep(gap)
    return robot


REST = [0.4, 0.6, 0.5]


def test_the_judge_sees_what_is_unsafe() -> None:
    assert judge(recorded("position", [REST] * 3), "position") == []
    for commands, told in (
        ([REST, [float("nan"), 0.6, 0.5]], "nan"),
        ([REST, REST[:2]], r"\[0.4, 0.6\]"),
        ([REST, [0.5, 0.6, 0.5]], "derivative 1 is 2, allowed 1.5"),
        ([REST, REST, [0.43, 0.6, 0.5]], "derivative 2 is 12, allowed 6"),
        ([[2.6, 0.6, 0.5]], "commanded"),
        ([[3.1, 0.0, 0.0]], "the tool is sent to"),
    ):
        with pytest.raises(ValueError, match=told):
            raise ValueError(judge(recorded("position", commands), "position"))
    assert "sent 0.0200 s after the last" in " ".join(judge(recorded("position", [REST] * 2, gap=0.02), "position"))
    moving = recorded("velocity", [[0.0, 0.0, 0.0], *[[0.01, 0.0, 0.0]] * 40])
    assert judge(moving, "velocity") == []
    moving.record = [(moment, command, 0.0 if moment < 0.5 else moment, joints) for moment, command, _, joints in moving.record]
    assert "moves on observations" in " ".join(judge(moving, "velocity"))
