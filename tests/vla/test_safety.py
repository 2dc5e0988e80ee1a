"""The gate, freshness and the emergency stop, one by one. VR-27, VR-33, VR-34."""

from dataclasses import replace
from math import pi
from threading import Thread

import pytest
import torch

from mmsdk.errors import InputError, ModelError, SafetyError
from mmsdk.vla.chunk_check import LONGEST, check_chunk, kept
from mmsdk.vla.clock import SimulatedClock
from mmsdk.vla.contract import Command, Contract, Feature, Workspace
from mmsdk.vla.envs.planar_arm import LINKS, PlanarArm, planar_contract, tool
from mmsdk.vla.estop import EmergencyStop
from mmsdk.vla.freshness import Freshness
from mmsdk.vla.gate import Gate
from mmsdk.vla.types import Observation, Stamp

DT = 0.05
HOME = torch.tensor([0.4, 0.6, 0.5], dtype=torch.float64)


def started(contract: Contract, at: torch.Tensor = HOME, **more: object) -> Gate:
    gate = Gate(contract, **more)
    gate.start(at)
    return gate


def test_a_wanted_jump_becomes_a_motion_within_the_limits() -> None:
    gate = started(planar_contract("position"))
    verdict = gate.towards(HOME + 1.0)
    assert torch.all((verdict.command - HOME) <= 1.5 * DT) and verdict.changes[0].startswith("joints[0]: 1.4 became 0.4")
    assert not gate.towards(verdict.command + (verdict.command - HOME)).changes


@pytest.mark.parametrize("bad", [[0.0, float("nan"), 0.0], [0.0, float("inf"), 0.0], [0.0, 0.0]])
def test_vr_27_what_is_no_action_never_passes(bad: list[float]) -> None:
    gate = started(planar_contract("position"))
    with pytest.raises(SafetyError, match="not finite|none is made up"):
        gate.towards(torch.tensor(bad))


def test_nothing_passes_before_the_robot_was_measured() -> None:
    gate = Gate(planar_contract("position"))
    for act in (lambda: gate.towards(HOME), lambda: gate.stop()):
        with pytest.raises(SafetyError, match="measured"):
            act()


def test_vr_34_standing_still_is_holding_in_position_mode_and_zero_in_velocity_mode() -> None:
    holds, drives = started(planar_contract("position")), started(planar_contract("velocity"))
    assert torch.equal(holds.stop().command, HOME) and torch.equal(drives.stop().command, torch.zeros(3, dtype=torch.float64))
    for _ in range(4):
        holds.towards(HOME + 1.0)
        drives.towards(torch.ones(3))
    measured = HOME + 0.1
    held = [holds.stop(measured).command for _ in range(40)]
    assert not any(bool((command.abs() < 0.3).any()) for command in held)
    torch.testing.assert_close(held[-1], measured, atol=1e-3, rtol=0)
    stopped = [drives.stop().command for _ in range(10)]
    assert bool((stopped[0] > 0.3).all()) and not stopped[-1].any() and drives.resting


def test_without_a_fresh_measurement_a_position_holds_where_braking_ends() -> None:
    gate = started(planar_contract("position"))
    for _ in range(6):
        last = gate.towards(HOME + 1.0).command
    commands = [gate.stop().command for _ in range(12)]
    assert bool((commands[0] > last).all()) and torch.equal(commands[-1], commands[-2])


def test_a_velocity_never_leads_out_of_the_range_less_the_lag() -> None:
    gate, position = started(planar_contract("velocity")), HOME.clone()
    for _ in range(200):
        position = position + gate.towards(torch.tensor([1.5, 1.5, -1.5])).command * DT
        gate.measure(position)
    torch.testing.assert_close(position, torch.tensor([2.0, 1.5, -1.5], dtype=torch.float64), atol=0.02, rtol=0)


def test_steps_are_kept_in_their_range_and_stop_at_zero() -> None:
    x = Feature("hand", "position", 3, "m", (-0.02,) * 3, (0.02,) * 3)
    place = Feature("hand", "position", 3, "m", (-0.5, -0.5, 0.0), (0.5, 0.5, 0.4))
    contract = Contract("steps", 20.0, (), (place,), (Command(x, "position", "step", "hand", acceleration=2.0, lag=0.05),))
    gate, hand, sent = started(contract, torch.tensor([0.0, 0.0, 0.2])), torch.tensor([0.0, 0.0, 0.2], dtype=torch.float64), []
    for _ in range(100):
        sent.append(gate.towards(torch.tensor([0.05, -0.01, 0.0])).command)
        hand = hand + sent[-1]
        assert not gate.measure(hand)
    assert float(torch.stack(sent).abs().max()) <= 0.02 + 1e-9 and float(hand[0]) <= 0.45 + 1e-6 and float(hand[0]) > 0.4
    assert not [gate.stop().command for _ in range(20)][-1].any()


def test_efforts_go_to_zero_at_their_rate() -> None:
    force = Feature("grip", "effort", 1, "N", (-40.0,), (40.0,))
    gate = started(Contract("hand", 20.0, (), (), (Command(force, "effort", "absolute", speed=200.0),)), torch.zeros(0))
    pushed = [float(gate.towards(torch.tensor([50.0])).command) for _ in range(6)]
    assert pushed == pytest.approx([10, 20, 30, 40, 40, 40])
    assert not gate.resting, "a constant effort still pushes"
    assert [float(gate.stop().command) for _ in range(6)] == pytest.approx([30, 20, 10, 0, 0, 0]) and gate.resting


@pytest.mark.parametrize(("low", "high"), [(5.0, 10.0), (-10.0, -5.0)])
def test_an_effort_that_cannot_go_to_zero_is_no_command(low: float, high: float) -> None:
    with pytest.raises(InputError, match="zero, which is standing still, lies outside of its range"):
        Command(Feature("grip", "effort", 1, "N", (low,), (high,)), "effort", "absolute", speed=200.0)


def test_the_tool_stays_in_its_box() -> None:
    box = Workspace((-1.0, -1.0, -1.0), (0.5, 1.0, 1.0), speed=0.5)
    with pytest.raises(ModelError, match="forward kinematics"):
        Gate(planar_contract("position", workspace=box))
    gate = started(planar_contract("position", workspace=box), torch.tensor([1.2, 0.6, 0.5]), forward=tool)
    points, told = [], set()
    for _ in range(60):
        verdict = gate.towards(torch.zeros(3))
        told |= set(verdict.changes)
        points.append(tool(verdict.command[None])[0])
    track = torch.stack(points)
    assert float(track[:, 0].max()) <= 0.5 + 1e-6 and float(torch.linalg.vector_norm(track.diff(dim=0), dim=-1).max()) <= 0.5 * DT + 1e-6
    assert any("workspace" in change for change in told)


@pytest.mark.parametrize("control", ["effort", "velocity"])
def test_a_workspace_is_not_kept_by_numbers_that_say_nothing_of_where_the_arm_is(control: str) -> None:
    """Newton metres, or speeds that nothing measures, taken for joint angles: kinematics put the tool anywhere."""
    box = Workspace((-1.0, -1.0, -1.0), (0.5, 1.0, 1.0))
    pushes = Feature("joints", control, 3, "N m" if control == "effort" else "rad/s", (-5.0,) * 3, (5.0,) * 3)
    contract = Contract("arm", 20.0, (), (), (Command(pushes, control, "absolute"),), box)
    with pytest.raises(ModelError, match=r"hangs on joints\[0\], joints\[1\], joints\[2\], whose place nobody knows"):
        Gate(contract, tool)


def test_a_hand_of_efforts_leaves_the_arms_workspace_as_it_is() -> None:
    """Kinematics that read the joints alone are kept, whatever the fingers push with."""
    box = Workspace((-1.0, -1.0, -1.0), (0.5, 1.0, 1.0))
    plain, push = planar_contract("position", workspace=box), Feature("grip", "effort", 1, "N", (-40.0,), (40.0,))
    contract = replace(plain, action=(*plain.action, Command(push, "effort", "absolute")))
    gate, start = Gate(contract, lambda rows: tool(rows[:, :3])), torch.tensor([1.2, 0.6, 0.5])
    gate.start(start)
    sent = torch.stack([gate.towards(torch.tensor([0.0, 0.0, 0.0, 30.0])).command for _ in range(60)])
    assert float(tool(sent[:, :3])[:, 0].max()) <= 0.5 + 1e-6 and float(sent[-1, 3]) == 30.0 and float(sent[-1, 0]) < 1.1


def test_the_arms_kinematics_are_those_of_its_links() -> None:
    joints = torch.tensor([[0.0, 0, 0], [pi / 2, 0, 0], [0.0, pi / 2, -pi / 2]], dtype=torch.float64)
    wanted = torch.tensor([[sum(LINKS), 0, 0], [0, sum(LINKS), 0], [LINKS[0] + LINKS[2], LINKS[1], 0]], dtype=torch.float64)
    torch.testing.assert_close(tool(joints), wanted, atol=1e-12, rtol=0)


def test_a_measurement_too_far_from_the_command_is_told() -> None:
    gate = started(planar_contract("position"))
    assert gate.measure(HOME + 0.4) == "" and gate.measure(HOME + 0.6).startswith("joints[0]: measured 1, commanded 0.4")


def test_a_robot_that_begins_again_is_where_it_is_measured_but_does_not_jump_by_what_it_is_behind() -> None:
    gate = started(planar_contract("position"))
    gate.start(HOME + 0.05)
    assert torch.equal(gate.stop().command, HOME + 0.05), "nothing had been commanded yet"
    gate.start(HOME)
    assert torch.equal(gate.stop().command, HOME + 0.05)
    gate.start(HOME + 0.2)
    assert torch.equal(gate.stop().command, HOME + 0.2)


def test_a_blocked_arm_is_held_where_it_is_measured_and_not_where_it_was_sent() -> None:
    gate = started(planar_contract("position"))
    for _ in range(20):
        gate.towards(HOME + 1.0)
    assert gate.measure(HOME) and (gate.stop().command - HOME).min() > 0.5, "without a measurement it would push on"
    gate.hold(HOME)
    held = torch.stack([gate.stop().command for _ in range(30)])
    torch.testing.assert_close(held[-1], HOME, atol=1e-3, rtol=0)
    assert not check_chunk(planar_contract("position"), held, held[:0]) and gate.measure(HOME) == ""
    gate.hold(HOME - 0.1)
    torch.testing.assert_close(gate.stop().command, HOME, atol=1e-3, rtol=0)


def test_a_velocity_goes_on_from_where_an_arm_that_was_moved_is_measured() -> None:
    gate = started(planar_contract("velocity"))
    assert gate.measure(HOME + 0.8)
    gate.hold(HOME + 0.8)
    assert gate.measure(HOME + 0.8) == "" and not gate.stop().command.any()


def hand(lag: float = 0.2) -> Contract:
    """Commanded from 1 (opened) to -1 (closed), measured in metres between the fingers."""
    width = Feature("width", "gripper", 1, "m", (0.0,), (0.08,), opened=0.08, closed=0.0)
    grip = Feature("grip", "gripper", 1, "one", (-1.0,), (1.0,), opened=1.0, closed=-1.0)
    return Contract("hand", 20.0, (), (width,), (Command(grip, "position", "absolute", "width", speed=20.0, lag=lag),))


def test_vr_02_a_gripper_starts_as_wide_as_it_is_measured_by_its_own_polarity() -> None:
    for metres, wanted in ((0.08, 1.0), (0.0, -1.0), (0.06, 0.5)):
        gate = started(hand(), torch.tensor([metres], dtype=torch.float64))
        assert float(gate.stop().command) == pytest.approx(wanted)


def test_a_gripper_that_holds_something_goes_on_closing_when_everything_stops() -> None:
    """Held at the measured width it would press no more, and drop what it holds; nor is the robot blocked for it."""
    gate, around = started(hand(), torch.tensor([0.08])), torch.tensor([0.05])
    for _ in range(5):
        gate.towards(torch.tensor([-1.0]))
        assert gate.measure(around) == ""
    assert float(gate.stop(around).command) == -1.0
    gate.hold(around)
    assert float(gate.stop().command) == -1.0
    gate.start(around)
    assert float(gate.stop(around).command) == -1.0, "nor does it drop when motion begins anew"


def test_a_gripper_is_measured_by_a_gripper() -> None:
    far = Feature("width", "position", 1, "m", (0.0,), (0.08,))
    with pytest.raises(InputError, match="a gripper is measured by a gripper"):
        replace(hand(), state=(far,))


def test_one_wild_measurement_is_not_where_a_robot_is() -> None:
    gate = Gate(planar_contract("position"))
    assert gate.agree([HOME, HOME + 0.01, HOME]) and not gate.agree([HOME, HOME + 1.0, HOME])


def test_actions_relative_to_what_was_seen_are_no_robots() -> None:
    contract = planar_contract("position")
    with pytest.raises(ModelError, match="convert it"):
        Gate(replace(contract, action=(replace(contract.action[0], meaning="relative"),)))


# ------------------------------------------------------------------------------------------------------- whole chunks


def chunk() -> torch.Tensor:
    """Too fast from step 3 on, out of range from step 7 on."""
    actions = HOME.repeat(10, 1)
    actions[3:, 0] += 0.2
    actions[7:, 1] = 2.3
    return actions


def test_vr_33_a_chunk_is_told_what_it_breaks_and_from_which_step_on() -> None:
    found = check_chunk(planar_contract("position"), chunk(), HOME.repeat(3, 1))
    first = {(violation.name, violation.limit): violation.step for violation in found}
    assert found[0].step == 3 and first["joints[0]", "speed"] == 3 and first["joints[1]", "value"] == 7
    assert "step 3: joints[0] has speed 4, allowed 1.5" in map(str, found)
    assert not check_chunk(planar_contract("position"), HOME.repeat(10, 1), HOME.repeat(3, 1))


def test_vr_33_it_is_clamped_cut_off_or_refused_and_never_forwarded() -> None:
    actions = chunk()
    found = check_chunk(planar_contract("position"), actions, HOME.repeat(3, 1))
    assert [kept(actions, found, policy).shape[0] for policy in ("clamp", "truncate", "refuse")] == [10, 3, 0]
    gate = started(planar_contract("position"))
    sent = torch.stack([gate.towards(action).command for action in actions])
    assert torch.equal(sent[:3], actions[:3]) and not check_chunk(planar_contract("position"), sent, HOME.repeat(3, 1))


def test_the_seam_to_what_was_sent_is_checked_too() -> None:
    found = check_chunk(planar_contract("position"), (HOME + 0.5).repeat(4, 1), HOME.repeat(3, 1))
    assert {violation.limit for violation in found if violation.step == 0} == {"speed", "acceleration", "jerk"}
    assert not check_chunk(planar_contract("position"), (HOME + 0.5).repeat(4, 1), torch.zeros(0, 3))


def test_speeds_are_checked_as_speeds() -> None:
    found = check_chunk(planar_contract("velocity"), torch.tensor([[0.0, 0, 0], [0.2, 0, 0], [1.9, 0, 0]]), torch.zeros(3, 3))
    assert {(violation.step, violation.limit) for violation in found} == {(2, "value"), (2, "speed"), (2, "acceleration"), (2, "jerk")}


@pytest.mark.parametrize("shape", [(0, 3), (4, 2), (4, 4)])
def test_vr_07_a_chunk_of_another_width_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(SafetyError, match="none is made up"):
        check_chunk(planar_contract("position"), torch.zeros(shape), HOME.repeat(3, 1))


def test_a_chunk_of_more_actions_than_ticks_leave_time_for_is_refused() -> None:
    contract = planar_contract("position")
    assert not check_chunk(contract, HOME.expand(LONGEST, 3), HOME.repeat(3, 1))
    with pytest.raises(SafetyError, match="a chunk of 4097 actions; at most 4096 are taken"):
        check_chunk(contract, HOME.expand(LONGEST + 1, 3), HOME.repeat(3, 1))


def test_vr_27_a_chunk_with_infinity_is_refused_and_the_place_named() -> None:
    actions = chunk()
    actions[4, 2] = float("inf")
    with pytest.raises(SafetyError, match="first at step 4, number 2"):
        check_chunk(planar_contract("position"), actions, HOME.repeat(3, 1))


# ---------------------------------------------------------------------------------------------------------- freshness


def looks(count: int = 3) -> tuple[Freshness, Observation, SimulatedClock]:
    """A freshness that has seen some good observations, the last of them, and the clock."""
    clock = SimulatedClock()
    arm = PlanarArm(planar_contract("position"), clock)
    freshness = Freshness(arm.contract)
    for _ in range(count):
        clock.sleep(DT)
        observation = arm.observe()
        assert not freshness.fault(observation, clock.now())
        freshness.take(observation, clock.now())
    return freshness, observation, clock


def test_some_good_observations_in_a_row_are_needed() -> None:
    freshness, observation, clock = looks(2)
    assert freshness.stale(clock.now()) == "2 of 3 good observations since it was stale"
    freshness.take(observation, clock.now())
    assert freshness.stale(clock.now()), "the same observation twice is one"
    assert not looks(3)[0].stale(clock.now() + DT)


def test_vr_34_an_old_observation_latches() -> None:
    freshness, observation, clock = looks()
    assert not freshness.stale(clock.now() + 0.19) and freshness.stale(clock.now() + 0.21).startswith("state is 0.210 s old")
    later = replace(observation, stamp=Stamp(clock.now() + 0.3))
    freshness.take(later, clock.now() + 0.3)
    assert freshness.stale(clock.now() + 0.3) == "1 of 3 good observations since it was stale"


def test_vr_34_a_camera_frozen_for_two_seconds_is_stale_though_the_state_is_not() -> None:
    freshness, observation, clock = looks()
    captured = {"side": observation.stamp.captured}
    for tick in range(1, 41):
        now = clock.now() + tick * DT
        freshness.take(replace(observation, stamp=Stamp(now), captured=captured), now)
    assert freshness.stale(now).startswith("side is 2.000 s old")


def test_a_camera_that_repeats_its_picture_under_new_stamps_is_stale_once_the_robot_moves() -> None:
    freshness, observation, clock = looks()
    for tick in range(1, 41):
        now = clock.now() + tick * DT
        freshness.take(replace(observation, stamp=Stamp(now)), now)
    assert not freshness.stale(now), "a robot that stands still may see the same"
    freshness.take(replace(observation, state=observation.state + 0.2, stamp=Stamp(now + DT)), now + DT)
    assert "side shows the same picture" in freshness.stale(now + DT)


def test_damaged_reordered_and_future_observations_are_told() -> None:
    freshness, good, clock = looks()
    now = clock.now()
    bad = {
        "older than what came": replace(good, stamp=Stamp(now - 0.01)),
        "in the future": replace(good, stamp=Stamp(now + 1)),
        "no picture of side": replace(good, images={}),
        "a state of 2 numbers": replace(good, state=good.state[:2]),
        "joints is nan": replace(good, state=good.state * float("nan")),
        "joints is inf": replace(good, state=good.state + float("inf")),
        "expected -2.5..2.5": replace(good, state=good.state + 9),
    }
    for told, observation in bad.items():
        assert told in freshness.fault(observation, now)
    freshness.restart(now)
    assert freshness.fault(replace(good, stamp=Stamp(now - 0.01)), now) == "captured before the episode began"


# ----------------------------------------------------------------------------------------------------- emergency stop


def test_the_emergency_stop_latches_and_cools_down() -> None:
    stop = EmergencyStop(0.5)
    stop.trip("button", 10.0)
    stop.trip("again", 10.2)
    assert stop.reason == "button"
    for moment in (10.1, 10.69, 9.0):
        with pytest.raises(SafetyError, match="no reset before 0.5 s"):
            stop.reset(moment)
    stop.reset(10.71)
    assert not stop.reason


@pytest.mark.parametrize("where", ["another thread", "a signal's handler"])
def test_a_trip_in_the_midst_of_a_reset_is_not_lost(where: str) -> None:
    """It comes right after the cooldown was found to be over."""
    threads: list[Thread] = []

    def trip() -> None:
        stop.trip("second", 20.0)

    class Interrupted(float):
        def __le__(self, other: float) -> bool:
            if where == "another thread":
                threads.append(Thread(target=trip))
                threads[0].start()
                threads[0].join(0.2)
            else:
                trip()
            return float(self) <= other

    stop = EmergencyStop(Interrupted(0.5))
    stop.trip("first", 10.0)
    stop.reset(15.0)
    for thread in threads:
        thread.join(5.0)
    assert stop.reason


def test_the_arm_takes_only_its_own_contract() -> None:
    force = Feature("f", "effort", 3, "N", (-1.0,) * 3, (1.0,) * 3)
    with pytest.raises(InputError, match="three joints"):
        PlanarArm(Contract("x", 20.0, (), (), (Command(force, "effort", "absolute"),)), SimulatedClock())
