"""The control loop: at a fixed rate one command a tick, while the policy thinks beside it.

loop = ControlLoop(robot, policy, hz=20)
report = loop.run(ticks=400)
print(report)

Every tick: observe, take in answers, ask anew where it is time, execute the next action of the plan. The gate has the last word on every
command; where there is nothing to execute, or nothing may be, the robot comes to rest and stays there. No way leads around the gate. A
robot that is measured further from its command than its `lag` is blocked: the plan ends at once, and it is held where it is measured.
What no loop can do is stop a robot while its own process hangs: a driver of velocities or efforts needs a dead-man of its own.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError, ModelError, SafetyError
from mmsdk.vla.accounting import Account, LoopReport
from mmsdk.vla.chunk_check import OnViolation
from mmsdk.vla.clock import Clock, SystemClock
from mmsdk.vla.contract import Contract
from mmsdk.vla.estop import EmergencyStop
from mmsdk.vla.freshness import Freshness
from mmsdk.vla.gate import Forward, Gate
from mmsdk.vla.plan import Plan, RecedingHorizon, averaging
from mmsdk.vla.requests import Pace, Requests, kind_of
from mmsdk.vla.types import ActionChunk, Effort, Observation, Policy, Robot
from mmsdk.vla.worker import Answer, Threaded, Worker

__all__ = ["ControlLoop", "Pace", "Tick", "receding"]

_SETTLING = 4096
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Tick:
    """One tick: the command sent (none before the robot was ever measured), why the robot was held ("": it was not), and what changed."""

    number: int
    now: float
    command: Float[Tensor, " a"] | None
    held: str
    changes: tuple[str, ...] = ()


def receding(contract: Contract) -> Plan:
    """The newest chunk replaces what is left of the one before."""
    return RecedingHorizon(averaging(contract))


class ControlLoop:
    """Runs one robot by one policy. `estop.trip` may be called from any thread; everything else from the one that runs the loop."""

    def __init__(
        self,
        robot: Robot,
        policy: Policy,
        hz: float,
        *,
        clock: Clock = SystemClock(),
        pace: Pace = Pace(),
        plan: Callable[[Contract], Plan] = receding,
        worker: Callable[[Policy], Worker] = Threaded,
        forward: Forward | None = None,
        on_violation: OnViolation = "clamp",
    ) -> None:
        """`forward` are the robot's kinematics, needed where the contract declares a workspace.

        `on_violation` says what becomes of a chunk that breaks limits: its actions are clamped one by one, cut off from the first that
        breaks one, or refused together. Raises InputError for a rate that is not the contract's, ModelError for a missing `forward`.
        """
        contract = robot.contract
        if abs(hz - contract.rate) > 1e-6 * contract.rate:
            raise InputError(f"{hz} Hz, but its actions are made for {contract.rate} a second", item=contract.name)
        self.robot, self.clock, self.pace, self.period = robot, clock, pace, 1.0 / hz
        self.gate, self.estop, self.freshness = Gate(contract, forward), EmergencyStop(contract.timing.cooldown), Freshness(contract)
        self.account = Account()
        self.requests = Requests(contract, worker(policy), plan(contract), pace, self.account, on_violation)
        self.warm = False
        self._standing: deque[Tensor] = deque(maxlen=contract.timing.recover)
        self._astray: deque[Observation] = deque(maxlen=contract.timing.recover)
        self._parted = ""
        self._watchdog, self._stale = contract.timing.watchdog, contract.timing.stale
        self._sent: deque[Tensor] = deque(maxlen=3)
        self._begun: float | None = None
        self._number = 0

    def run(self, ticks: int) -> LoopReport:
        """This many ticks at the loop's rate, warmed up before; however it ends, the robot is brought to rest."""
        if not self.warm:
            self.warm_up()
        if self._begun is not None:
            # the time between two runs is no overrun
            self._begun = self.clock.now()
        try:
            for _ in range(ticks):
                self.wait()
                self.tick()
        finally:
            self.settle()
        return self.report()

    def warm_up(self) -> None:
        """Ask the policy until it has answered `pace.warm_up` times, while nothing is sent to the robot. Neither counts in any statistic.

        Raises ModelError where the policy raises, or does not answer within `pace.cold` seconds.
        """
        for answered in range(self.pace.warm_up):
            observation = self._fresh()
            sent = self.clock.now()
            self.requests.ask(observation, Effort.FULL, self._number, sent, sent + self.pace.cold)
            result = self._answer(sent).result
            if not isinstance(result, ActionChunk):
                raised = result if isinstance(result, BaseException) else None
                raise ModelError(f"the policy cannot be warmed up: {result!r}") from raised
            if answered == 0:
                self.account.cold_start = self.clock.now() - sent
        self.account.requests, self.warm = 0, True
        self.requests.begin(self.requests.episode)

    def wait(self) -> None:
        """Sleep until the next tick is due. Where the clock says that it is past, or far off, one whole period passes all the same.

        So two commands are never closer together than a period, whatever the clock does, but for a step forward of less than a period,
        which looks like time that went by; ticks that were missed are not caught up with.
        What was planned before a pause longer than an observation may be old is forgotten: the world has gone on.
        """
        if self._begun is None:
            return
        due = self._begun + self.period
        left = due - self.clock.now()
        punctual = 0 <= left <= self.period + _ROUNDING
        self.clock.sleep(left if punctual else self.period)
        if self.clock.now() - due - (0 if punctual else self.period) > self._stale:
            self.requests.forget()
        if punctual:
            self.account.jitter.append(abs(self.clock.now() - due))
        else:
            self.account.overruns += 1

    def tick(self) -> Tick:
        """One tick, now."""
        begun = self._begun = self.clock.now()
        self._number += 1
        self.account.ticks += 1
        self._observe()
        # after the observation, which may have been captured since the tick began
        now = self.clock.now()
        self.requests.collect(self._number, now, self._sent)
        forbidden = self._forbidden(now)
        newest = self.freshness.newest
        if self.estop.reason or self._parted or self.freshness.latched or newest is None or not self.warm:
            self.requests.forget()
        else:
            if forbidden:
                # what was planned before was for another situation
                self.requests.plan.clear()
            self.requests.ask_if_due(newest, self._number, now)
        tick = self._command(now, forbidden)
        self.account.busy.append(self.clock.now() - begun)
        return tick

    def settle(self) -> None:
        """Bring the robot to rest, at the loop's rate. Raises SafetyError where its limits do not let it."""
        self.requests.forget()
        for _ in range(_SETTLING):
            if not self.gate.started or self.gate.resting:
                return
            self.clock.sleep(self.period)
            self._begun = self.clock.now()
            self._apply(self.gate.stop().command)
        raise SafetyError("the robot cannot be brought to rest within its limits")

    def reset(self) -> None:
        """A new episode: the robot comes to rest; what was observed, planned and asked before counts no more; the policy forgets."""
        self.settle()
        self.requests.begin(self.requests.episode + 1)
        self._restart()

    def release(self) -> None:
        """Bring the robot to rest, then reset the emergency stop: motion begins anew from where the robot is measured.

        Raises SafetyError, and stays stopped, during the cooldown, where the robot does not come to rest, and if tripped meanwhile.
        """
        asked = self.clock.now()
        self.settle()
        self.estop.reset(asked)
        self._restart()

    def report(self) -> LoopReport:
        """What the loop has done so far."""
        return self.account.report()

    def _restart(self) -> None:
        self.freshness.restart(self.clock.now())
        self.gate.started = False
        self._sent.clear()
        self._standing.clear()
        self._astray.clear()
        self._parted = ""

    def _fresh(self) -> Observation:
        """A fresh observation, waited for before the loop runs."""
        begun = self.clock.now()
        while self.freshness.stale(self.clock.now()):
            self._pass(begun, "the robot gives no fresh observation")
        assert self.freshness.newest is not None, "what is not stale has been observed"
        return self.freshness.newest

    def _answer(self, begun: float) -> Answer:
        """The first answer, waited for before the loop runs."""
        while True:
            answers = self.requests.worker.collect()
            if answers:
                return answers[0]
            self._pass(begun, "the policy does not answer")

    def _pass(self, begun: float, told: str) -> None:
        if self.clock.now() - begun > self.pace.cold:
            raise ModelError(f"{told} within {self.pace.cold:g} s")
        self.clock.sleep(self.period)
        self._observe()

    def _observe(self) -> None:
        """Take in what the robot says, if it is good. Before anything is sent, the robot stands where it is measured."""
        try:
            observation = self.robot.observe()
        except InputError as error:
            fault = error.message
        else:
            now = self.clock.now()
            fault = self.freshness.fault(observation, now) or self._measured(observation)
            if not fault:
                self.freshness.take(observation, now)
        if fault:
            self.account.reasons[f"observation: {kind_of(fault)}"] += 1

    def _measured(self, observation: Observation) -> str:
        """Whether the robot is where it was sent; what is wrong where it is not."""
        newest = self.freshness.newest
        if newest is not None and newest.stamp.captured == observation.stamp.captured:
            return ""
        if self.gate.started and self.warm:
            self._parted = self.gate.measure(observation.state)
            self._wander(observation)
            return self._parted
        self._standing.append(observation.state)
        if len(self._standing) == self._standing.maxlen and self.gate.agree(self._standing):
            self.gate.start(observation.state)
        return ""

    def _wander(self, observation: Observation) -> None:
        """Of measurements far from the command one may be damaged; where some in a row agree, something blocks the robot, or moves it."""
        if not self._parted:
            self._astray.clear()
            return
        captured = observation.stamp.captured
        # the same one again is no second witness
        if not self._astray or self._astray[-1].stamp.captured < captured or self._astray[-1].stamp.captured > self.clock.now():
            self._astray.append(observation)
            if len(self._astray) == self._astray.maxlen and self.gate.agree([each.state for each in self._astray]):
                self.gate.hold(observation.state)

    def _forbidden(self, now: float) -> str:
        """Why nothing may be executed, "" where something may."""
        stale = self.freshness.stale(now)
        self.account.stale += bool(stale)
        if self.estop.reason:
            return f"emergency stop: {self.estop.reason}"
        if not self.warm:
            return "the policy is not warm"
        if self._parted:
            return f"the robot is not where it was sent: {self._parted}"
        if stale:
            return f"stale: {stale}"
        if self.requests.ladder.effort == Effort.HOLD:
            return "the policy is too slow"
        # by ticks and by the clock: a loop that was stopped has counted no ticks
        silent = max((self._number - self.requests.useful) * self.period, self.requests.silent(now))
        return f"watchdog: no new chunk for {silent:.3f} s" if silent > self._watchdog else ""

    def _command(self, now: float, forbidden: str) -> Tick:
        if not self.gate.started or not self.warm:
            return Tick(self._number, now, None, forbidden or "the robot has not been measured")
        action = None if forbidden else self.requests.pop(now)
        held = forbidden or ("" if action is not None else "no action is left")
        if action is None:
            newest = self.freshness.newest
            verdict = self.gate.stop(newest.state if newest is not None and not self.freshness.old(now) else None)
            self.account.held += 1
            self.account.reasons[f"held: {held.split(':')[0]}"] += 1
        else:
            verdict = self.gate.towards(action)
            self.account.changed += bool(verdict.changes)
        self._apply(verdict.command)
        return Tick(self._number, now, verdict.command, held, verdict.changes)

    def _apply(self, command: Tensor) -> None:
        self.account.moved(self.gate.jerks())
        self._sent.append(command)
        self.robot.apply(command)
