"""One run of the demo's robot: the control loop in a thread of its own, and what a page needs to see of it, ten times a second."""

import itertools
import time
from collections import deque
from dataclasses import dataclass
from threading import Event, Thread
from types import TracebackType
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, UInt8

from mmsdk.apps.web.arm import ArmScene
from mmsdk.apps.web.belt import BeltScene
from mmsdk.errors import MmsdkError, ModelError
from mmsdk.vla.accounting import LoopReport
from mmsdk.vla.drive import Drive, Session, Settings
from mmsdk.vla.loop import Pace, Tick
from mmsdk.vla.types import ActionChunk, Policy, Request, Robot
from mmsdk.vla.unwaited import POLICY_THREAD

__all__ = ["DEADLINE", "FUTURE", "PAST", "Plotted", "Pondering", "Run", "View", "World"]

DEADLINE = 0.5  # seconds that an answer may take
PAUSE = 15  # ticks that an ended episode stays in sight
PAST, FUTURE = 50, 24  # commands that are shown, and actions that are planned
SETTLED = 25  # ticks that a stopped robot is watched
LONGEST = 25 * 120  # ticks of a run

Scene = BeltScene | ArmScene


@runtime_checkable
class World(Robot, Protocol):
    """A simulated robot that plays one episode after the other."""

    success: str

    @property
    def over(self) -> bool:
        """Whether the episode has ended."""
        ...

    @property
    def outcome(self) -> str:
        """How it ended, `success` or another word; "" while it goes on."""
        ...

    def scene(self) -> Scene:
        """What is to be seen of it. Only once something was observed."""
        ...

    def begin(self) -> None:
        """The next episode."""
        ...

    def close(self) -> None:
        """Give back what it takes."""
        ...


@dataclass(frozen=True, slots=True)
class Plotted:
    """One number of the actions: its name and its range, and what was sent and what is planned of it."""

    name: str
    low: float
    high: float
    sent: Float[np.ndarray, " k"]
    planned: Float[np.ndarray, " m"]


@dataclass(frozen=True, slots=True)
class View:
    """One moment of a run. `ended` says of each episode before whether it was a success, `outcome` how this one ended."""

    tick: int
    rate: float
    cameras: tuple[UInt8[np.ndarray, "h w 3"], ...]
    scene: Scene
    instruction: str
    plots: tuple[Plotted, ...]
    latencies: tuple[float, ...]
    held: str
    outcome: str
    success: str
    ended: tuple[bool, ...]
    report: LoopReport
    stopped: str = ""


@dataclass(frozen=True, slots=True)
class Pondering:
    """A policy that answers after `thinking` seconds at the earliest, as a larger model would."""

    policy: Policy
    thinking: float

    def reset(self, episode: int) -> None:
        """See `Policy`."""
        self.policy.reset(episode)

    def __call__(self, request: Request) -> ActionChunk:
        """See `Policy`."""
        begun = time.monotonic()
        chunk = self.policy(request)
        time.sleep(max(0.0, self.thinking - (time.monotonic() - begun)))
        return chunk


class Run:
    """Begins with `start`; `view` is the newest moment. `trip` stops the robot, which is then held, and soon ends the run."""

    def __init__(self, world: World, policy: Policy) -> None:
        self.world = world
        settings = Settings(Pace(expert=5, adapter=5, vlm=5, deadline=DEADLINE))
        self._drive: Drive = Session(world, policy, settings=settings).drive()
        self._end = Event()
        self._views: deque[View] = deque(maxlen=1)
        self._sent: deque[list[float]] = deque(maxlen=PAST)
        self._outcomes: list[bool] = []
        self._failure: deque[BaseException] = deque(maxlen=1)
        # a daemon: the program's end does not wait for a robot of numbers, and knows it by its name
        self._thread = Thread(target=self._run, name=POLICY_THREAD, daemon=True)

    @property
    def view(self) -> View | None:
        """The newest moment, once there is one. Raises what ended the run; as a ModelError, what nobody foresaw."""
        for failure in self._failure:
            if isinstance(failure, MmsdkError):
                raise failure
            raise ModelError(f"the run broke off: {type(failure).__name__}: {failure}") from failure
        return self._views[-1] if self._views else None

    @property
    def running(self) -> bool:
        """Whether it still goes on."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def trip(self, reason: str) -> None:
        """The emergency stop, from any thread."""
        self._drive.trip(reason)

    def end(self) -> None:
        """Bring the robot to rest and end, in a moment."""
        self._end.set()

    def _run(self) -> None:
        with _Kept(self._failure):
            try:
                self._drive.warm_up()
                self._play()
                self._drive.settle()
            finally:
                self.world.close()

    def _play(self) -> None:
        """Episode after episode, until the end, the stop, or the longest run."""
        left = PAUSE
        stopped = itertools.count(1)
        for _ in range(LONGEST):
            self._tick()
            if self._end.is_set() or (self._drive.loop.estop.reason and next(stopped) > SETTLED):
                return
            if self.world.over and not self._drive.loop.estop.reason:
                left -= 1
                if left == 0:
                    self._outcomes.append(self.world.outcome == self.world.success)
                    self._drive.reset()
                    self.world.begin()
                    left = PAUSE

    def _tick(self) -> None:
        tick = self._drive.step()
        if tick.command is not None:
            self._sent.append(tick.command.tolist())
        # nothing is known of a new episode before it was observed
        if self._drive.loop.freshness.newest is not None:
            self._views.append(self._seen(tick))

    def _seen(self, tick: Tick) -> View:
        loop = self._drive.loop
        newest, contract = loop.freshness.newest, loop.robot.contract
        assert newest is not None, "something was observed"
        return View(
            tick.number,
            contract.rate,
            tuple(newest.images[each.name].pixels.permute(1, 2, 0).numpy().copy() for each in contract.cameras),
            self.world.scene(),
            newest.instruction,
            self._plots(),
            tuple(1000 * seconds for seconds in list(loop.account.latency)[-40:]),
            tick.held,
            self.world.outcome,
            self.world.success,
            tuple(self._outcomes),
            loop.report(),
            loop.estop.reason,
        )

    def _plots(self) -> tuple[Plotted, ...]:
        loop = self._drive.loop
        contract = loop.robot.contract
        sent = np.array(self._sent, np.float64).reshape(-1, contract.action_size)
        planned = loop.requests.plan.pending()[:FUTURE].numpy().copy().reshape(-1, contract.action_size)
        return tuple(
            Plotted(_called(each.feature.name, each.feature.size, place), each.feature.low[place], each.feature.high[place],
                    sent[:, column], planned[:, column])
            for each, place, column in contract.each_command()
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Kept:
    """Whatever is raised inside is kept for whoever looks, and ends the thread without a word: a run that broke off is no good end."""

    failure: deque[BaseException]

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is not None:
            self.failure.append(error)
        return True


def _called(name: str, size: int, place: int) -> str:
    return name if size == 1 else f"{name} {'xyz'[place]}" if size == 3 else f"{name} {place}"
