"""The control loop with an arm and a simulated clock: rates, deadlines, freshness, and what becomes of late and broken answers."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from threading import Event

import pytest
import torch

from mmsdk.errors import InputError, ModelError, SafetyError
from mmsdk.vla.clock import SimulatedClock, SystemClock
from mmsdk.vla.contract import Command, Contract, Feature, Timing
from mmsdk.vla.envs.planar_arm import PlanarArm, planar_contract
from mmsdk.vla.loop import ControlLoop, Pace
from mmsdk.vla.plan import Plan, RecedingHorizon, TemporalEnsemble, averaging
from mmsdk.vla.types import ActionChunk, Effort, Observation, Policy, Request, Robot, Stamp
from mmsdk.vla.worker import Answer, Delayed, Threaded, Worker

HZ = 20.0
DT = 1 / HZ


@dataclass
class Reach:
    """Moves the first joint by `step` an action from where it was seen, `length` actions far."""

    step: float = 0.01
    length: int = 16
    asked: list[Request] = field(default_factory=list)
    episodes: list[int] = field(default_factory=list)

    def reset(self, episode: int) -> None:
        self.episodes.append(episode)

    def __call__(self, request: Request) -> ActionChunk:
        self.asked.append(request)
        begin = request.pending[0] if len(request.pending) else request.observation.state
        way = torch.zeros(self.length, 3, dtype=torch.float64)
        way[:, 0] = self.step * torch.arange(1, self.length + 1)
        return ActionChunk(begin + way, request.observation.stamp, "reach")


@dataclass
class Scripted:
    """Hands out whatever the test puts in, whenever the test puts it in."""

    requests: list[Request] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    busy: bool = False

    def reset(self, episode: int) -> None:
        self.episode = episode

    def submit(self, request: Request) -> None:
        self.requests.append(request)

    def collect(self) -> list[Answer]:
        answers, self.answers = self.answers, []
        return answers


def arm(clock: SimulatedClock, control: str = "position", timing: Timing = Timing()) -> PlanarArm:
    return PlanarArm(planar_contract(control, HZ, timing=timing), clock)


def simulated(
    policy: Policy | None = None,
    latency: Callable[[Request], float] = lambda request: 0.06,
    pace: Pace = Pace(),
    control: str = "position",
    **more: object,
) -> tuple[ControlLoop, PlanarArm, SimulatedClock]:
    clock = SimulatedClock()
    robot = arm(clock, control)
    loop = ControlLoop(robot, policy or Reach(), HZ, clock=clock, pace=pace, worker=lambda policy: Delayed(policy, clock, latency), **more)
    return loop, robot, clock


def scripted(timing: Timing = Timing(), pace: Pace = Pace(warm_up=0)) -> tuple[ControlLoop, Scripted, PlanarArm, SimulatedClock]:
    """A loop some ticks into its run, whose policy is the test itself."""
    clock, worker = SimulatedClock(), Scripted()
    robot = arm(clock, timing=timing)
    loop = ControlLoop(robot, Reach(), HZ, clock=clock, pace=pace, worker=lambda policy: worker)
    loop.warm_up()
    ticked(loop, 4)
    return loop, worker, robot, clock


def ticked(loop: ControlLoop, count: int) -> list[str]:
    """Why the robot was held, tick by tick."""
    held = []
    for _ in range(count):
        loop.wait()
        held.append(loop.tick().held)
    return held


def answer(request: Request, *values: float) -> Answer:
    """A chunk whose first joint takes these values, for this request."""
    actions = request.observation.state.repeat(len(values), 1)
    actions[:, 0] = torch.tensor(values, dtype=torch.float64)
    return Answer(request.observation.stamp.request, ActionChunk(actions, request.observation.stamp))


def test_the_arm_goes_where_the_policy_says_at_the_loops_rate() -> None:
    loop, robot, clock = simulated(Reach(step=0.02))
    before, begun = robot.joints[0], clock.passed
    report = loop.run(100)
    assert isinstance(robot, Robot) and isinstance(loop.requests.worker, Worker) and isinstance(loop.requests.plan, Plan)
    assert robot.joints[0] - before > 1.0 and report.ticks == 100
    assert clock.passed - begun == pytest.approx(100 * DT, abs=1.0)
    assert report.deadline_misses == report.dropped_late == report.refused_chunks == report.overruns == 0
    assert report.held_rate < 0.1 and report.stale_rate == 0 and report.latency_ms.p50 == pytest.approx(100, abs=50)
    assert loop.gate.resting


def test_every_action_can_be_traced_to_its_observation() -> None:
    policy = Reach()
    loop, _, _ = simulated(policy)
    loop.run(60)
    loop.reset()
    loop.run(60)
    stamps = [request.observation.stamp for request in policy.asked]
    assert [stamp.request for stamp in stamps] == list(range(1, len(stamps) + 1)) and {stamp.episode for stamp in stamps} == {0, 1}
    assert all(stamp.deadline > stamp.captured for stamp in stamps) and policy.episodes == [0, 0, 1]


def test_vr_32_a_seed_belongs_to_its_request() -> None:
    runs = []
    for _ in range(2):
        policy = Reach()
        simulated(policy, pace=Pace(seed=100))[0].run(40)
        runs.append([request.observation.stamp.seed for request in policy.asked])
    assert runs[0] == runs[1] == [100 + number for number in range(1, len(runs[0]) + 1)]


def test_vr_14_nothing_moves_before_the_policy_is_warm_and_the_cold_start_counts_nowhere() -> None:
    calls: list[float] = []

    def latency(request: Request) -> float:
        calls.append(10.0 if not calls else 0.06)
        return calls[-1]

    loop, robot, _ = simulated(latency=latency, pace=Pace(warm_up=2))
    sent: list[torch.Tensor] = []
    robot.apply = sent.append  # type: ignore[method-assign]
    loop.warm_up()
    assert not sent and loop.warm and len(calls) == 2
    report = loop.report()
    assert report.cold_start_ms == pytest.approx(10_000, abs=100) and report.latency_ms.count == report.requests == 0


def test_vr_14_a_policy_that_never_warms_up_is_told() -> None:
    with pytest.raises(ModelError, match="does not answer within 2 s"):
        simulated(latency=lambda request: 1e9, pace=Pace(cold=2.0))[0].run(1)

    class Broken(Reach):
        def __call__(self, request: Request) -> ActionChunk:
            raise ValueError("no weights")

    with pytest.raises(ModelError, match="cannot be warmed up: ValueError"):
        simulated(Broken())[0].run(1)

    clock, worker, answered = SimulatedClock(), Scripted(), Answer(1, ActionChunk(torch.zeros(1, 3), Stamp(0.0)))
    object.__setattr__(answered, "result", torch.zeros(1, 3))
    worker.answers = [answered]
    with pytest.raises(ModelError, match="cannot be warmed up: tensor"):
        ControlLoop(arm(clock), Reach(), HZ, clock=clock, worker=lambda policy: worker).warm_up()


def test_vr_10_a_first_answer_of_five_seconds_skips_nothing() -> None:
    """At 20 Hz, never warmed up: the robot stands while it waits, so the first chunk is executed from its first action on."""
    calls: list[Request] = []

    def latency(request: Request) -> float:
        calls.append(request)
        return 5.0 if len(calls) == 1 else 0.06

    loop, robot, _ = simulated(Reach(0.02), latency, Pace(warm_up=0, deadline=6.0))
    loop.warm_up()
    before = robot.joints[0]
    ticked(loop, 110)
    assert robot.joints[0] > before and calls[-1].delay <= 3
    assert loop.requests.delay.estimate <= 3 and loop.account.refused == 0


def test_vr_16_a_late_reply_is_never_taken_for_the_next() -> None:
    loop, worker, _, _ = scripted(pace=Pace(warm_up=0, deadline=0.2))
    first = worker.requests[0]
    ticked(loop, 6)
    second = worker.requests[-1]
    assert second.observation.stamp.request == first.observation.stamp.request + 1 and loop.account.misses == 1
    worker.answers = [answer(first, 0.9, 0.9, 0.9)]
    assert ticked(loop, 1) == ["no action is left"] and loop.account.late == 1
    worker.answers = [answer(second, 0.41, 0.42)]
    assert ticked(loop, 1) == [""]


@pytest.mark.parametrize("deadline", [0.2, 0.4])
def test_vr_17_after_a_timeout_the_next_request_is_answered_and_the_deadline_is_the_configured_one(deadline: float) -> None:
    """One answer never comes; what is asked next is sent, awaited as long as was said, and its answer executed."""
    loop, worker, _, clock = scripted(pace=Pace(warm_up=0, deadline=deadline))
    (first,) = worker.requests
    asked = first.observation.stamp.captured
    while len(worker.requests) == 1:
        ticked(loop, 1)
    assert clock.now() - asked == pytest.approx(deadline, abs=1.5 * DT) and loop.account.misses == 1
    worker.answers = [answer(worker.requests[-1], 0.41, 0.42)]
    assert ticked(loop, 1) == [""] and loop.account.misses == 1


@pytest.mark.parametrize("late", [0, 2, 3])
def test_a_chunk_is_as_old_as_its_observation_and_so_much_of_it_is_past(late: int) -> None:
    """The camera is `late` ticks late. Each action is meant for a moment, and executed at that moment: .2 rad/s, by the clock."""
    clock, moments = SimulatedClock(), list[tuple[float, float]]()
    robot, seen = arm(clock), list[Observation]()
    observe, apply = robot.observe, robot.apply

    def delayed() -> Observation:
        seen.append(observe())
        return seen[max(0, len(seen) - 1 - late)]

    def watched(action: torch.Tensor) -> None:
        moments.append((clock.now(), float(action[0])))
        apply(action)

    class Timed(Reach):
        def __call__(self, request: Request) -> ActionChunk:
            self.asked.append(request)
            times = request.observation.stamp.captured + DT * torch.arange(24, dtype=torch.float64)
            actions = torch.tensor([0.0, 0.6, 0.5], dtype=torch.float64).repeat(24, 1)
            actions[:, 0] = 0.4 + 0.2 * times
            return ActionChunk(actions, request.observation.stamp)

    robot.observe, robot.apply = delayed, watched  # type: ignore[method-assign]
    policy = Timed()
    loop = ControlLoop(robot, policy, HZ, clock=clock, pace=Pace(expert=4), worker=lambda policy: Delayed(policy, clock, lambda _: 0.06))
    loop.warm_up()
    ticked(loop, 60)
    assert all(value == pytest.approx(0.4 + 0.2 * now, abs=1e-9) for now, value in moments[-25:])
    last = policy.asked[-1]
    assert float(last.pending[0, 0]) == pytest.approx(0.4 + 0.2 * last.observation.stamp.captured) and last.delay == late + 2


@pytest.mark.parametrize("horizon", [2, 6])
def test_a_plans_horizon_counts_from_the_capture_and_not_from_the_arrival(horizon: int) -> None:
    """Two actions of it are past when a chunk arrives: of six that the plan looks at four are left, of two none."""
    clock, worker = SimulatedClock(), Scripted()
    loop = ControlLoop(
        arm(clock), Reach(), HZ, clock=clock, pace=Pace(warm_up=0, expert=2), worker=lambda policy: worker,
        plan=lambda contract: RecedingHorizon(averaging(contract), horizon=horizon),
    )  # fmt: skip
    loop.warm_up()
    ticked(loop, 4)
    worker.answers = [answer(worker.requests[-1], *[0.4 + 0.001 * k for k in range(20)])]
    assert ticked(loop, 2) == ["", ""] and len(worker.requests) == 2
    worker.answers = [answer(worker.requests[-1], *[0.4 + 0.001 * k for k in range(20)])]
    assert ticked(loop, 1) == (["no action is left"] if horizon == 2 else [""])
    assert len(loop.requests.plan.pending()) == (0 if horizon == 2 else 3) and loop.account.refused == (horizon == 2)


# ------------------------------------------------------------------------------------------------- measured elsewhere


def recorded(robot: PlanarArm) -> list[torch.Tensor]:
    sent: list[torch.Tensor] = []
    apply = robot.apply
    robot.apply = lambda action: (sent.append(action), apply(action))[1]  # type: ignore[method-assign]
    return sent


def test_a_blocked_arm_is_held_where_it_is_measured() -> None:
    """A wall at .8 rad; the policy pushes on. The plan ends as soon as the arm is half a radian behind, and the command comes back."""

    class Walled(PlanarArm):
        def _move(self) -> None:
            super()._move()
            self.joints[0] = min(self.joints[0], 0.8)

    clock = SimulatedClock()
    robot = Walled(planar_contract("position", HZ), clock)
    loop = ControlLoop(robot, Reach(0.02), HZ, clock=clock, worker=lambda policy: Delayed(policy, clock, lambda request: 0.06))
    sent = recorded(robot)
    loop.warm_up()
    held = ticked(loop, 80)
    assert any(told.startswith("the robot is not where it was sent: joints[0]: measured 0.8") for told in held)
    pushed = [float(command[0]) for command in sent]
    assert max(pushed) < 0.8 + 0.5 + 0.08 and min(pushed[pushed.index(max(pushed)) :]) < 1.15
    assert loop.account.reasons["held: the robot is not where it was sent"] >= 1


def test_an_arm_that_somebody_moves_is_held_where_it_is_moved_to() -> None:
    loop, _, robot, _ = scripted(Timing(watchdog=9.0), Pace(warm_up=0, deadline=9.0))
    sent, observe = recorded(robot), robot.observe
    there = torch.tensor([1.6, 0.6, 0.5], dtype=torch.float64)
    robot.observe = lambda: replace(observe(), state=there)  # type: ignore[method-assign]
    held = ticked(loop, 60)
    assert held[0].startswith("the robot is not where it was sent") and held[-1] == "no action is left"
    torch.testing.assert_close(sent[-1], there, atol=1e-3, rtol=0)
    assert float(torch.stack(sent).diff(dim=0).abs().max()) <= 1.5 * DT + 1e-9


@pytest.mark.parametrize("times", [1, 2, 6])
def test_one_wild_measurement_stops_the_plan_but_is_not_followed(times: int) -> None:
    """Nor is it when a driver hands out the same one again and again: it remains one witness."""
    loop, worker, robot, _ = scripted(Timing(stale=0.5))
    worker.answers = [answer(worker.requests[-1], *[0.4 + 0.001 * k for k in range(40)])]
    assert ticked(loop, 3)[-1] == ""
    sent, observe = recorded(robot), robot.observe
    wild = replace(robot.observe(), state=torch.tensor([1.6, 0.6, 0.5], dtype=torch.float64))
    wild = replace(wild, stamp=replace(wild.stamp, captured=wild.stamp.captured + 0.01))
    robot.observe = lambda: wild  # type: ignore[method-assign]
    held = ticked(loop, times)
    assert all(told.startswith("the robot is not where it was sent") for told in held) and not len(loop.requests.plan.pending())
    robot.observe = observe  # type: ignore[method-assign]
    assert ticked(loop, 6)[-1] == "no action is left"
    assert max(abs(float(command[0]) - 0.4) for command in sent) < 0.02


def test_answers_with_another_stamp_or_out_of_order_are_dropped() -> None:
    loop, worker, _, _ = scripted()
    (request,) = worker.requests
    good = answer(request, 0.41, 0.42)
    assert isinstance(good.result, ActionChunk)
    forged = replace(good.result, stamp=replace(good.result.stamp, episode=7))
    worker.answers = [Answer(99, good.result), Answer(good.request, forged), good]
    assert ticked(loop, 1) == ["no action is left"]
    assert loop.account.late == 2 and loop.account.refused == 1


def test_vr_11_a_reply_that_is_all_past_leaves_the_plan() -> None:
    loop, worker, _, _ = scripted(pace=Pace(warm_up=0, expert=2))
    worker.answers = [answer(worker.requests[-1], *[0.4 + 0.001 * k for k in range(20)])]
    ticked(loop, 4)
    left = len(loop.requests.plan.pending())
    worker.answers = [answer(worker.requests[-1], 0.4)]
    assert ticked(loop, 1) == [""] and len(loop.requests.plan.pending()) == left - 1 and loop.account.refused == 1


@pytest.mark.parametrize("on_violation", ["clamp", "truncate", "refuse"])
def test_vr_33_a_chunk_that_breaks_limits_never_reaches_the_robot_as_it_is(on_violation: str) -> None:
    """Out of range and far too fast, all the time."""
    sent: list[torch.Tensor] = []

    class Wild(Reach):
        def __call__(self, request: Request) -> ActionChunk:
            far = torch.linspace(0, 30, 16, dtype=torch.float64)[:, None].expand(16, 3)
            return ActionChunk(request.observation.state + far, request.observation.stamp)

    loop, robot, _ = simulated(Wild(), on_violation=on_violation)
    apply = robot.apply
    robot.apply = lambda action: (sent.append(action), apply(action))[1]  # type: ignore[method-assign]
    report = loop.run(80)
    track = torch.stack(sent)
    assert float(track.diff(dim=0).abs().max()) <= 1.5 * DT + 1e-9
    assert bool((track <= torch.tensor([2.5, 2.0, 2.0]) + 1e-9).all())
    assert any(reason.startswith("chunk: ") for reason in report.reasons) and (report.changed_rate > 0.5) == (on_violation == "clamp")


def test_vr_09_two_chunks_half_a_radian_apart_are_joined_within_the_limits() -> None:
    """Through the ensemble and the gate; the jerk is reported, and no more than the contract's."""

    class Torn(Reach):
        def __call__(self, request: Request) -> ActionChunk:
            self.asked.append(request)
            actions = torch.tensor([0.4, 0.6, 0.5], dtype=torch.float64).repeat(20, 1)
            actions[:, 0] += 0.5 * (len(self.asked) // 10 % 2)
            return ActionChunk(actions, request.observation.stamp)

    def ensemble(contract: Contract) -> TemporalEnsemble:
        return TemporalEnsemble(averaging(contract))

    loop, robot, _ = simulated(Torn(), plan=ensemble, pace=Pace(expert=1))
    reached = []
    loop.warm_up()
    for _ in range(120):
        ticked(loop, 1)
        reached.append(robot.joints[0])
    report = loop.report()
    assert max(reached) > 0.6 and 0 < report.jerk_rms <= report.jerk_peak <= 120 + 1e-6


@pytest.mark.parametrize("control", ["position", "velocity"])
def test_vr_34_a_frozen_camera_stops_the_robot_in_its_own_mode(control: str) -> None:
    class Steady(Reach):
        def __call__(self, request: Request) -> ActionChunk:
            return ActionChunk(torch.full((16, 3), 0.2, dtype=torch.float64), request.observation.stamp)

    loop, robot, _ = simulated(Reach(0.02) if control == "position" else Steady(), control=control)
    loop.warm_up()
    ticked(loop, 30)
    seen = robot.observe()
    observe = robot.observe
    robot.observe = lambda: replace(observe(), images=seen.images, captured={"side": seen.stamp.captured})  # type: ignore[method-assign]
    held = ticked(loop, 40)
    stood = list(robot.joints)
    assert not held[2] and held[-1].startswith("stale: side is 2.0") and any(abs(joint) > 0.1 for joint in stood)
    tick = loop.tick()
    assert tick.command is not None and (not tick.command.any() if control == "velocity" else abs(float(tick.command[0]) - stood[0]) < 0.01)
    robot.observe = observe  # type: ignore[method-assign]
    assert ticked(loop, 1)[0].startswith("stale: 1 of 3") and "" in ticked(loop, 10)


def test_a_run_ends_with_no_effort_left() -> None:
    """A constant push is no rest: the last command is 0 N, reached at the declared rate."""
    force = Feature("grip", "effort", 1, "N", (-40.0,), (40.0,))
    hand = Contract("hand", HZ, (), (), (Command(force, "effort", "absolute", speed=50.0),))
    clock, sent = SimulatedClock(), list[float]()

    class Hand:
        contract = hand

        def observe(self) -> Observation:
            return Observation({}, torch.zeros(0, dtype=torch.float64), "hold it", Stamp(clock.now()))

        def apply(self, action: torch.Tensor) -> None:
            sent.append(float(action[0]))

    class Pushes(Reach):
        def __call__(self, request: Request) -> ActionChunk:
            return ActionChunk(torch.full((16, 1), 5.0, dtype=torch.float64), request.observation.stamp)

    loop = ControlLoop(Hand(), Pushes(), HZ, clock=clock, worker=lambda policy: Delayed(policy, clock, lambda request: 0.0))
    loop.run(30)
    assert 5.0 in sent and sent[-1] == 0.0 and max(abs(after - before) for before, after in pairwise(sent)) <= 2.5 + 1e-9


def test_an_empty_plan_holds_and_says_so() -> None:
    loop, _, robot, _ = scripted()
    before = list(robot.joints)
    assert set(ticked(loop, 8)) == {"no action is left"}
    assert robot.joints == pytest.approx(before, abs=1e-6)


def test_the_watchdog_holds_a_robot_that_hears_nothing_new() -> None:
    loop, worker, _, _ = scripted(Timing(watchdog=0.5), Pace(warm_up=0, deadline=3.0))
    worker.answers = [answer(worker.requests[-1], *[0.4 + 0.001 * k for k in range(40)])]
    held = ticked(loop, 20)
    assert held[5] == "" and held[-1].startswith("watchdog: no new chunk for") and not len(loop.requests.plan.pending())


def test_a_plan_does_not_survive_a_stall() -> None:
    """The process stood still for longer than an observation may be old, but sees again at once: what was planned is past."""
    loop, worker, _, clock = scripted(Timing(recover=1), Pace(warm_up=0, deadline=9.0))
    worker.answers = [answer(worker.requests[-1], *[0.4 + 0.001 * k for k in range(40)])]
    assert ticked(loop, 5)[-1] == ""
    clock.sleep(0.15)
    assert ticked(loop, 2) == ["", ""], "no longer than an observation may be old"
    clock.sleep(DT + 0.25)
    assert ticked(loop, 2)[-1] == "no action is left" and not len(loop.requests.plan.pending())


def test_vr_07_a_chunk_without_rows_is_refused_and_the_loop_goes_on() -> None:
    loop, worker, _, _ = scripted()
    (request,) = worker.requests
    stamp = request.observation.stamp
    chunk = ActionChunk(torch.zeros(1, 3), stamp)
    object.__setattr__(chunk, "actions", torch.zeros(3))
    worker.answers = [Answer(stamp.request, chunk)]
    assert ticked(loop, 1) == ["no action is left"] and loop.account.refused == 1


@pytest.mark.parametrize(
    "actions",
    [
        [[0.4] * 3],
        torch.zeros(2, 3).numpy(),
        torch.zeros(2, 3, dtype=torch.int64),
        torch.zeros(2, 3, dtype=torch.complex64),
        torch.zeros(2, 3).to(torch.float8_e4m3fn),
        torch.zeros(2, 3).to_sparse(),
        torch.zeros(2, 3, device="meta"),
    ],
    ids=["list", "numpy", "whole", "complex", "eight-bit", "sparse", "meta"],
)
def test_vr_07_what_is_no_tensor_of_numbers_is_refused_and_the_loop_goes_on(actions: object) -> None:
    loop, worker, _, _ = scripted()
    stamp = worker.requests[0].observation.stamp
    chunk = ActionChunk(torch.zeros(1, 3), stamp)
    object.__setattr__(chunk, "actions", actions)
    worker.answers = [Answer(stamp.request, chunk)]
    assert ticked(loop, 1) == ["no action is left"] and loop.account.refused == 1
    assert "answer: its actions are no tensor of floating-point numbers" in loop.report().reasons


def test_what_is_pending_is_a_copy() -> None:
    """The policy reads it in its own thread, and may write on it."""
    loop, worker, _, _ = scripted(pace=Pace(warm_up=0, expert=2))
    worker.answers = [answer(worker.requests[-1], *[0.4 + 0.001 * k for k in range(20)])]
    ticked(loop, 3)
    assert len(worker.requests[-1].pending) > 10
    worker.requests[-1].pending.fill_(9.0)
    assert float(loop.requests.plan.pending().max()) < 1.0


def test_a_policy_still_busy_after_its_warm_up_timed_out_is_told() -> None:
    loop, _, _ = simulated(latency=lambda request: 1e9, pace=Pace(cold=2.0))
    for told in ("does not answer within 2 s", "still at an earlier request"):
        with pytest.raises(ModelError, match=told):
            loop.run(1)


def test_the_watchdog_counts_by_the_clock_too() -> None:
    """Ticks that come far apart: few of them, but long without a new chunk."""
    loop, worker, _, clock = scripted(Timing(watchdog=0.5, stale=0.4, recover=1), Pace(warm_up=0, deadline=9.0))
    worker.answers = [answer(worker.requests[-1], *[0.4 + 0.001 * k for k in range(40)])]
    held = []
    for _ in range(6):
        clock.sleep(0.2)
        held += ticked(loop, 1)
    assert held[1] == "" and held[-1].startswith("watchdog: no new chunk for")


def test_late_answers_lead_down_the_ladder_to_a_hold_and_punctual_ones_up_again() -> None:
    policy, slow = Reach(), [True]
    loop, _, _ = simulated(policy, lambda request: 0.4 if slow[0] else 0.02, Pace(expert=2, deadline=0.2, patience=2, warm_up=0))
    loop.warm_up()
    held = ticked(loop, 80)
    efforts = [request.effort for request in policy.asked]
    assert efforts[:5] == [Effort.FULL, Effort.SKIP_REFINE, Effort.REUSE_SLOW, Effort.FEWER_STEPS, Effort.FEWER_STEPS]
    assert held[-1] == "the policy is too slow" and loop.account.misses >= 4
    slow[0] = False
    ticked(loop, 60)
    assert policy.asked[-1].effort == Effort.FULL


def test_each_part_of_the_policy_is_due_at_its_own_rate() -> None:
    policy = Reach()
    simulated(policy, lambda request: 0.0, Pace(expert=5, adapter=10, vlm=20, warm_up=0))[0].run(103)
    due = [request.due for request in policy.asked]
    counts = [sum(name in parts for parts in due) for name in ("expert", "adapter", "vlm")]
    assert counts[0] == pytest.approx(20, abs=1) and counts[1] == pytest.approx(10, abs=1) and counts[2] == pytest.approx(5, abs=1)


def test_the_emergency_stop_stops_from_anywhere_and_is_left_only_by_hand() -> None:
    loop, robot, clock = simulated(Reach(0.02))
    loop.warm_up()
    ticked(loop, 30)
    loop.estop.trip("button", clock.now())
    held = ticked(loop, 40)
    still = list(robot.joints)
    assert set(held) == {"emergency stop: button"}
    ticked(loop, 10)
    assert robot.joints == pytest.approx(still, abs=1e-6)
    loop.estop.trip("button", clock.now())
    with pytest.raises(SafetyError, match="no reset before 0.5 s"):
        loop.release()
    ticked(loop, 11)
    loop.release()
    assert "" in ticked(loop, 15)


@pytest.mark.parametrize("again", [False, True])
def test_the_emergency_stop_stays_until_the_robot_is_at_rest(again: bool) -> None:
    """Released while the robot still moves, it is latched for as long as that brakes; tripped meanwhile, it stays so."""
    loop, robot, clock = simulated(Reach(0.05))
    loop.warm_up()
    ticked(loop, 25)
    loop.estop.trip("button", clock.now() - 10)
    apply, reasons = robot.apply, list[str]()

    def watched(action: torch.Tensor) -> None:
        reasons.append(loop.estop.reason)
        apply(action)
        if again:
            loop.estop.trip("again", clock.now())

    robot.apply = watched  # type: ignore[method-assign]
    assert not loop.gate.resting
    if again:
        with pytest.raises(SafetyError, match="no reset before"):
            loop.release()
    else:
        loop.release()
    assert reasons and set(reasons) == {"button"} and loop.estop.reason == ("button" if again else "")


def test_vr_35_percentiles_misses_and_stale_rate_are_printed() -> None:
    """500 ticks that begin 0, 1, 2, 3, 4 ms late in turn; every fiftieth answer is late for its deadline."""

    class Sluggish(SimulatedClock):
        slept = 0

        def sleep(self, seconds: float) -> None:
            self.slept += 1
            super().sleep(seconds + 0.001 * (self.slept % 5))

    clock, asked = Sluggish(), []

    def latency(request: Request) -> float:
        asked.append(request)
        return 0.9 if len(asked) % 50 == 0 else 0.06

    loop = ControlLoop(arm(clock), Reach(0.001), HZ, clock=clock, worker=lambda policy: Delayed(policy, clock, latency))
    report = loop.run(500)
    assert report.jitter_ms.p50 == pytest.approx(2.0) and report.jitter_ms.p99 == pytest.approx(4.0) and report.jitter_ms.count >= 490
    assert report.deadline_misses == len(asked) // 50 == 1 and report.stale_rate == 0 and report.latency_ms.largest < 200
    for told in ("p50", "p95", "p99", "deadline misses 1", "stale 0.0%", "not counted below"):
        assert told in str(report)


def test_vr_12_small_steps_are_all_seen() -> None:
    """Observations a hundredth of a radian apart: nothing filters them, and no gap opens between requests."""
    policy = Reach(step=0.0005)
    simulated(policy, lambda request: 0.06, Pace(expert=4))[0].run(200)
    captured = [request.observation.stamp.captured for request in policy.asked[1:]]
    gaps = [after - before for before, after in pairwise(captured)]
    assert len(captured) >= 48 and max(gaps) < 0.5


def test_two_commands_are_never_closer_than_a_period_whatever_the_clock_says() -> None:
    loop, robot, clock = simulated(Reach(0.02))
    times: list[float] = []
    apply = robot.apply
    robot.apply = lambda action: (times.append(clock.passed), apply(action))[1]  # type: ignore[method-assign]
    loop.warm_up()
    for jump in (0.0, 5.0, -5.0, 0.3, -0.3, 100.0):
        ticked(loop, 10)
        clock.jump(jump)
    ticked(loop, 10)
    assert min(after - before for before, after in pairwise(times)) >= DT - 1e-9
    assert loop.account.overruns == 5


def test_a_rate_that_is_not_the_contracts_is_refused() -> None:
    with pytest.raises(InputError, match="30.0 Hz, but its actions are made for 20.0"):
        ControlLoop(arm(SimulatedClock()), Reach(), 30.0)


def test_vr_15_a_policy_that_hangs_leaves_the_robot_held_and_the_loop_alive() -> None:
    """On the machine's own clock and threads: the third call hangs until the test lets it go, and is then dropped."""
    let_go = Event()

    class Hangs(Reach):
        def __call__(self, request: Request) -> ActionChunk:
            chunk = super().__call__(request)
            if len(self.asked) == 3:
                assert let_go.wait(10)
            return chunk

    class Live(PlanarArm):
        def observe(self) -> Observation:
            seen, now = super().observe(), SystemClock().now()
            self._clock.sleep(0.01)
            return replace(seen, stamp=replace(seen.stamp, captured=now))

    policy = Hangs(0.001, 8)
    robot = Live(planar_contract("position", 100.0), SimulatedClock())
    loop = ControlLoop(robot, policy, 100.0, pace=Pace(expert=4, deadline=0.05, cold=5.0), worker=Threaded)
    loop.warm_up()
    held = ticked(loop, 60)
    assert held[-1] and loop.account.misses == 1 and len(policy.asked) == 3
    let_go.set()
    after = ticked(loop, 60)
    # on a machine with other work to do more than one may be late
    assert loop.account.late >= 1 and "" in after and len(policy.asked) > 4
