"""One run of the demo's robot: the control loop in a thread of its own, and what a page needs to see of it, ten times a second."""

import itertools
from collections import deque
from dataclasses import dataclass
from threading import Event, Lock, Thread

import numpy as np
from jaxtyping import Float, UInt8

from mmsdk.apps.web.belt import HORIZON, BeltHand, Script
from mmsdk.errors import MmsdkError
from mmsdk.vla.accounting import LoopReport
from mmsdk.vla.drive import Drive, Session, Settings
from mmsdk.vla.loop import Pace

__all__ = ["DEADLINE", "Run", "Scene", "View"]

DEADLINE = 0.5  # seconds that an answer may take
PAUSE = 15  # ticks that an ended episode stays in sight
PAST = 50  # commands that are shown
SETTLED = 25  # ticks that a stopped robot is watched
LONGEST = 25 * 120  # ticks of a run
LATE = 8  # ticks that the camera is late


@dataclass(frozen=True, slots=True)
class Scene:
    """What is really there, in metres: the hand, the things (of which `there` are), the speed of the belt, and whether it may be picked."""

    hand: tuple[float, float]
    closed: float
    things: tuple[tuple[float, float, bool], ...]
    seen: tuple[float, ...]
    wanted: int
    speed: float
    go: bool


@dataclass(frozen=True, slots=True)
class View:
    """One moment of a run. `sent` are the last commands and `planned` those to come, both in the contract's numbers."""

    tick: int
    camera: UInt8[np.ndarray, "h w 3"]
    scene: Scene
    instruction: str
    sent: Float[np.ndarray, "k a"]
    planned: Float[np.ndarray, "m a"]
    latencies: tuple[float, ...]
    held: str
    outcome: str
    ended: tuple[str, ...]
    report: LoopReport
    stopped: str = ""


class Run:
    """Begins with `start`; `view` is the newest moment. `trip` stops the robot, which is then held, and soon ends the run."""

    def __init__(self, cued: bool, thinking: float, seed: int = 0) -> None:
        """`thinking` are the seconds that the policy takes for an answer."""
        self.robot = BeltHand(cued, seed)
        settings = Settings(Pace(expert=5, adapter=5, vlm=5, deadline=DEADLINE))
        self._drive: Drive = Session(self.robot, Script(self.robot, thinking), settings=settings).drive()
        self._end, self._lock = Event(), Lock()
        self._views: deque[View] = deque(maxlen=1)
        self._sent: deque[list[float]] = deque(maxlen=PAST)
        self._outcomes: list[str] = []
        self._failure: MmsdkError | None = None
        # a daemon: the program's end does not wait for a robot of numbers
        self._thread = Thread(target=self._run, name="robot", daemon=True)

    @property
    def view(self) -> View | None:
        """The newest moment, once there is one. Raises what ended the run, where it was an error."""
        if self._failure is not None:
            raise self._failure
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
        try:
            self._drive.warm_up()
            self._play()
            self._drive.settle()
        except MmsdkError as error:
            self._failure = error

    def _play(self) -> None:
        """Episode after episode, until the end, the stop, or the longest run."""
        left = PAUSE
        stopped = itertools.count(1)
        for _ in range(LONGEST):
            self._tick()
            if self._end.is_set() or (self._drive.loop.estop.reason and next(stopped) > SETTLED):
                return
            if self.robot.over and not self._drive.loop.estop.reason:
                left -= 1
                if left == 0:
                    self._outcomes.append(self.robot.hands.outcome[0] or "out of time")
                    self._drive.reset()
                    self.robot.begin()
                    left = PAUSE

    def _tick(self) -> None:
        tick = self._drive.step()
        if tick.command is not None:
            self._sent.append(tick.command.tolist())
        loop = self._drive.loop
        newest = loop.freshness.newest
        assert newest is not None, "a loop that ticks has observed"
        planned = loop.requests.plan.pending()[:HORIZON].numpy().copy()
        self._views.append(
            View(
                tick.number,
                newest.images["belt"].pixels.permute(1, 2, 0).numpy().copy(),
                self._scene(),
                newest.instruction,
                np.array(self._sent, np.float64).reshape(-1, loop.robot.contract.action_size),
                planned.reshape(-1, loop.robot.contract.action_size),
                tuple(1000 * seconds for seconds in list(loop.account.latency)[-40:]),
                tick.held,
                self.robot.hands.outcome[0],
                tuple(self._outcomes),
                loop.report(),
                loop.estop.reason,
            )
        )

    def _scene(self) -> Scene:
        hands, episodes = self.robot.hands, self.robot.hands.episodes
        now = episodes.go.new_full((1,), hands.step)
        late = episodes.go.new_full((1,), max(0, hands.step - LATE))
        places, lanes, there = episodes.at(now)[0].tolist(), episodes.lane[0].tolist(), episodes.there[0].tolist()
        x, y = hands.place[0].tolist()
        closed = float(hands.state()[0, 2])
        return Scene(
            (x, y), closed, tuple(zip(places, lanes, there, strict=True)), tuple(episodes.at(late)[0].tolist()),
            int(episodes.wanted[0]), float(episodes.speed[0]), hands.step >= int(episodes.go[0]),
        )  # fmt: skip
