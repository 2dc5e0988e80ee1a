"""A control loop as programs drive it: what it is made of, and the few things that are done with it, each of which may be listened to.

Everything that a program lets a loop do goes through a `Drive`, so that a recording (`mmsdk.vla.record`) knows what to do again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

from mmsdk.errors import InputError
from mmsdk.vla.accounting import LoopReport
from mmsdk.vla.chunk_check import OnViolation
from mmsdk.vla.clock import Clock, SystemClock
from mmsdk.vla.contract import Contract
from mmsdk.vla.gate import Forward
from mmsdk.vla.loop import ControlLoop, Pace, Tick, receding
from mmsdk.vla.plan import Plan, TemporalEnsemble, averaging
from mmsdk.vla.types import Policy, Robot
from mmsdk.vla.worker import Threaded, Worker

__all__ = ["Act", "Drive", "Kind", "PlanName", "Session", "Settings", "ensemble", "unheard"]

PlanName = Literal["receding", "ensemble"]
Kind = Literal["warm_up", "step", "settle", "reset", "release", "trip"]


@dataclass(frozen=True, slots=True)
class Act:
    """Something that is done with a loop; for a trip also why, and at which second by the loop's clock."""

    kind: Kind
    reason: str = ""
    at: float = 0.0


def ensemble(contract: Contract) -> Plan:
    """The mean of all chunks that speak of a tick."""
    return TemporalEnsemble(averaging(contract))


def unheard(act: Act) -> None:
    """Nobody listens."""


_PLANS: dict[PlanName, Callable[[Contract], Plan]] = {"receding": receding, "ensemble": ensemble}


@dataclass(frozen=True, slots=True)
class Settings:
    """How a loop runs, in values that can be written down."""

    pace: Pace = Pace()
    plan: PlanName = "receding"
    on_violation: OnViolation = "clamp"

    def __post_init__(self) -> None:
        for value, known in ((self.plan, get_args(PlanName)), (self.on_violation, get_args(OnViolation))):
            if value not in known:
                raise InputError(f"{value!r} is none of {', '.join(known)}", item="settings")


@dataclass(frozen=True, slots=True)
class Session:
    """A robot, a policy for it, and how one runs the other: all that a loop is made of, at the rate of the robot's contract."""

    robot: Robot
    policy: Policy
    clock: Clock = SystemClock()
    worker: Callable[[Policy], Worker] = Threaded
    settings: Settings = field(default_factory=Settings)
    forward: Forward | None = None

    def loop(self) -> ControlLoop:
        """A new loop. Raises as `ControlLoop` does."""
        return ControlLoop(
            self.robot,
            self.policy,
            self.robot.contract.rate,
            clock=self.clock,
            pace=self.settings.pace,
            plan=_PLANS[self.settings.plan],
            worker=self.worker,
            forward=self.forward,
            on_violation=self.settings.on_violation,
        )

    def drive(self) -> "Drive":
        """A new loop, to be driven. Raises as `ControlLoop` does."""
        return Drive(self.loop(), self.clock)


@dataclass(frozen=True, slots=True)
class Drive:
    """What is done with a loop; `told` hears of each act before it is done. `trip` may come from any thread, all else from the loop's."""

    loop: ControlLoop
    clock: Clock
    told: Callable[[Act], None] = unheard

    def warm_up(self) -> None:
        """See `ControlLoop.warm_up`."""
        self.told(Act("warm_up"))
        self.loop.warm_up()

    def step(self) -> Tick:
        """Wait until the next tick is due, and do it."""
        self.told(Act("step"))
        self.loop.wait()
        return self.loop.tick()

    def settle(self) -> None:
        """See `ControlLoop.settle`."""
        self.told(Act("settle"))
        self.loop.settle()

    def reset(self) -> None:
        """See `ControlLoop.reset`."""
        self.told(Act("reset"))
        self.loop.reset()

    def release(self) -> None:
        """See `ControlLoop.release`."""
        self.told(Act("release"))
        self.loop.release()

    def trip(self, reason: str) -> None:
        """Stop the robot (see `EmergencyStop.trip`)."""
        now = self.clock.now()
        self.told(Act("trip", reason, now))
        self.loop.estop.trip(reason, now)

    def report(self) -> LoopReport:
        """What the loop has done so far."""
        return self.loop.report()
