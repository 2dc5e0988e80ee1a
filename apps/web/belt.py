"""The simulated robot of the demo: the hand over the belt behind the `Robot` protocol, in real time, and the script that drives it.

The script knows everything (`mmsdk.vla.envs.belt.expert`): no policy that sees is trained for this task yet, and the page says so. What is
real is all around it: the control loop at 25 Hz, chunks that come late, the gate that has the last word, the emergency stop.
"""

import copy
from collections import deque
from dataclasses import dataclass
from threading import Lock

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.vision.types import Image
from mmsdk.vla.clock import Clock, SystemClock
from mmsdk.vla.contract import Camera, Command, Contract, Feature, Timing
from mmsdk.vla.envs.belt import HEIGHT, LIMIT, RATE, WIDTH, Hands, draw, expert, picture
from mmsdk.vla.types import ActionChunk, Observation, Request, Stamp

__all__ = ["HORIZON", "BeltHand", "BeltScene", "Script", "belt_contract"]

HORIZON = 24  # actions of a chunk: nearly a second
REMEMBERED = 2 * RATE  # moments that a slow answer may still be about
LATE = 8  # ticks that the camera is late
NEAR = 0.04  # of the reach: from so near the script may close


@dataclass(frozen=True, slots=True)
class BeltScene:
    """What is really there, in metres: the hand, the things (of which `there` are), the speed of the belt, and whether it may be picked."""

    hand: tuple[float, float]
    closed: float
    things: tuple[tuple[float, float, bool], ...]
    seen: tuple[float, ...]
    wanted: int
    speed: float
    go: bool


def belt_contract() -> Contract:
    """Along and across the belt, 1 at the ends of the reach, and the fingers; what it may do is what the hand can: 0.8 m/s."""
    along, across = Feature("along", "position", 1, "one", (-1.0,), (1.0,)), Feature("across", "position", 1, "one", (-1.0,), (1.0,))
    fingers = Feature("fingers", "gripper", 1, "fraction", (0.0,), (1.0,), opened=0.0, closed=1.0)
    commands = (
        Command(along, "position", "absolute", "along", speed=2.0, acceleration=20.0, jerk=800.0, lag=0.5),
        Command(across, "position", "absolute", "across", speed=12.0, acceleration=150.0, jerk=8000.0, lag=2.0),
        Command(fingers, "position", "absolute", "fingers"),
    )
    camera = Camera("belt", HEIGHT, WIDTH, "rgb", "chw")
    # nothing moves in the picture while the belt is empty of what is wanted
    timing = Timing(frozen=60.0)
    return Contract("hand over a belt", float(RATE), (camera,), (along, across, fingers), commands, timing=timing)


class BeltHand:
    """One hand and one episode at a time. `cued` says whether a lamp tells, at the beginning alone, which of two things is wanted."""

    success = "picked"

    def __init__(self, cued: bool, seed: int, clock: Clock = SystemClock()) -> None:
        self._cued, self._clock = cued, clock
        self._generator = torch.Generator().manual_seed(seed)
        self._contract = belt_contract()
        # the policy thinks in a thread of its own
        self._lock = Lock()
        self._seen: deque[tuple[float, Hands]] = deque(maxlen=REMEMBERED)
        self.hands = self._drawn()

    @property
    def contract(self) -> Contract:
        """See `Robot`."""
        return self._contract

    @property
    def over(self) -> bool:
        """Whether the episode has ended: the hand has closed, or time is up."""
        return self.hands.step >= LIMIT or bool(self.hands.outcome[0])

    @property
    def outcome(self) -> str:
        """How the episode ended; "" while it goes on."""
        said: str = self.hands.outcome[0]
        return said or ("out of time" if self.over else "")

    def scene(self) -> BeltScene:
        """What is really there."""
        hands, episodes = self.hands, self.hands.episodes
        now = episodes.go.new_full((1,), hands.step)
        late = episodes.go.new_full((1,), max(0, hands.step - LATE))
        places, lanes, there = episodes.at(now)[0].tolist(), episodes.lane[0].tolist(), episodes.there[0].tolist()
        x, y = hands.place[0].tolist()
        return BeltScene(
            (x, y), float(hands.state()[0, 2]), tuple(zip(places, lanes, there, strict=True)), tuple(episodes.at(late)[0].tolist()),
            int(episodes.wanted[0]), float(episodes.speed[0]), hands.step >= int(episodes.go[0]),
        )  # fmt: skip

    def close(self) -> None:
        """There is nothing to give back."""

    def begin(self) -> None:
        """The next episode: other things, another speed, the hand at home."""
        with self._lock:
            self.hands = self._drawn()
            self._seen.clear()

    def observe(self) -> Observation:
        """See `Robot`: the hand as it is, and the belt as the camera shows it, 0.32 s late."""
        with self._lock:
            now = self._clock.now()
            self._seen.append((now, copy.deepcopy(self.hands)))
            seen = (picture(self.hands.episodes, self.hands.step)[0] + 1) * 127.5
            state = self.hands.state()[0, :3].double()
        told = "pick the thing of the lamp's colour" if self._cued else "pick what comes by"
        return Observation({"belt": Image(seen.round().to(torch.uint8), "belt")}, state, told, Stamp(now))

    def apply(self, action: Float[Tensor, " a"]) -> None:
        """See `Robot`: one step of the belt and the hand."""
        wish = torch.tensor([[action[0], action[1], 1.0 if action[2] > 0.5 else -1.0]])
        with self._lock:
            self.hands.apply(wish)

    def at(self, moment: float) -> Hands:
        """Everything there is, as it was when an observation was taken."""
        with self._lock:
            known = [hands for when, hands in self._seen if when <= moment]
            return copy.deepcopy(known[-1] if known else self.hands)

    def _drawn(self) -> Hands:
        return Hands(draw(torch.tensor([self._cued]), self._generator))


@dataclass(slots=True)
class Script:
    """A policy that plays the episode forward as the expert would."""

    robot: BeltHand

    def reset(self, episode: int) -> None:
        """See `Policy`: nothing is remembered."""

    def __call__(self, request: Request) -> ActionChunk:
        """See `Policy`."""
        hands = self.robot.at(request.observation.stamp.captured)
        first = expert(hands)
        # closing is not undone: only what is near already is closed on, whatever the plan foresees
        near = bool((hands.state()[:, 0] - first[:, 0]).abs() < NEAR)
        actions = []
        for _ in range(HORIZON):
            wish = expert(hands)
            if not near:
                wish[:, 2] = -1.0
            hands.apply(wish)
            actions.append(torch.tensor([float(wish[0, 0]), float(wish[0, 1]), float(wish[0, 2] > 0)], dtype=torch.float64))
        return ActionChunk(torch.stack(actions), request.observation.stamp, "script")
