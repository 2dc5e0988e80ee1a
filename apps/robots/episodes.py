"""Episodes of Meta-World under the real control loop and its gate, in simulated time: what they are run with, and how they end.

While the policy thinks, simulated time stands still, unless a condition says for how long it thinks; then the arm goes on meanwhile. The
seconds that thinking really took on this machine are kept beside.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from mmsdk.errors import InputError
from mmsdk.vision.types import Image
from mmsdk.vla.chunking.rtc import Anew, Chunking, RealTimeChunking
from mmsdk.vla.clock import SimulatedClock
from mmsdk.vla.drive import Drive, PlanName, Session, Settings
from mmsdk.vla.envs.metaworld import TASKS, MetaWorld
from mmsdk.vla.loop import Pace
from mmsdk.vla.types import ActionChunk, Policy, Request
from mmsdk.vla.worker import Delayed

__all__ = ["HELD_OUT", "LONGEST", "MODES", "Condition", "Ended", "condition", "played", "unwatched"]

HELD_OUT = 10_000
"""The first seed that no demonstration began with."""
LONGEST = 300
"""Steps of an episode that does not succeed; Meta-World's own scripts take about a hundred."""
_STALLED, _MOVED = 60, 0.005
_ASKED = 6

MODES: dict[str, tuple[Chunking, PlanName, int]] = {
    "anew": (Anew(), "receding", _ASKED),
    "ensemble": (Anew(), "ensemble", 2),
    "vjp": (RealTimeChunking("vjp"), "receding", _ASKED),
    "identity": (RealTimeChunking("identity"), "receding", _ASKED),
    "hard-prefix": (RealTimeChunking("hard-prefix"), "receding", _ASKED),
}
"""Each chunking mode: what guides the flow, how chunks are consumed, and every how many ticks the policy is asked."""
_ELSE = {
    "reach-v3": "push-v3", "push-v3": "reach-v3", "pick-place-v3": "push-v3", "door-open-v3": "drawer-open-v3",
    "drawer-open-v3": "drawer-close-v3", "drawer-close-v3": "drawer-open-v3", "button-press-topdown-v3": "door-open-v3",
    "peg-insert-side-v3": "reach-v3", "window-open-v3": "window-close-v3", "window-close-v3": "window-open-v3",
}  # fmt: skip
"""Whose instruction is given as the wrong one: that of another task with the same things on the table, where there is one."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What is done to a policy: for how many ms it thinks, how its chunks are joined, what it sees and is told, how few tokens it has."""

    name: str
    delay: float = 0.0
    mode: str = "anew"
    blind: bool = False
    wrong: bool = False
    compress: str = "identity"


@dataclass(frozen=True, slots=True)
class Ended:
    """How an episode ended: `stalled` where the hand has stood still for too long, `unsafe` commands that were sent."""

    seed: int
    success: bool
    steps: int
    stalled: bool
    unsafe: int


@dataclass(frozen=True, slots=True)
class Watched:
    """A `Policy` under a condition; `seconds` are what each of its answers really took."""

    policy: Policy
    instruction: str
    blind: bool = False
    seconds: list[float] = field(default_factory=list)

    def reset(self, episode: int) -> None:
        """See `Policy`."""
        self.policy.reset(episode)

    def __call__(self, request: Request) -> ActionChunk:
        """See `Policy`."""
        seen = request.observation
        images = {name: Image(torch.zeros_like(each.pixels), name) if self.blind else each for name, each in seen.images.items()}
        begun = time.perf_counter()
        chunk = self.policy(replace(request, observation=replace(seen, images=images, instruction=self.instruction)))
        self.seconds.append(time.perf_counter() - begun)
        return chunk


def condition(name: str) -> Condition:
    """The condition of a name: default, blind, wrong-instruction, tokens-N (percent), delay-MS or delay-MS-MODE. Raises InputError."""
    head, _, rest = name.partition("-")
    if name == "default":
        return Condition(name)
    if name == "blind":
        return Condition(name, blind=True)
    if name == "wrong-instruction":
        return Condition(name, wrong=True)
    if head == "tokens" and rest.isdigit() and 0 < int(rest) <= 100:
        return Condition(name, compress=f"divprune:{int(rest) / 100:g}")
    ms, _, mode = rest.partition("-")
    if head == "delay" and ms.isdigit() and (mode or "anew") in MODES:
        return Condition(name, delay=float(ms), mode=mode or "anew")
    raise InputError(f"there are default, blind, wrong-instruction, tokens-25, and delay-200-MODE with {', '.join(MODES)}", item=name)


def unwatched(robot: MetaWorld) -> None:
    """Nobody looks on."""


def played(
    robot: MetaWorld,
    clock: SimulatedClock,
    policy: Policy,
    under: Condition,
    seeds: Sequence[int],
    look: Callable[[MetaWorld], None] = unwatched,
) -> tuple[list[Ended], list[float]]:
    """An episode for each seed, how it ended, and the ms that each answer really took; `look` is called at every tick."""
    task = _ELSE[robot.task] if under.wrong else robot.task
    watched = Watched(policy, TASKS[task][0], under.blind)
    _, plan, asked = MODES[under.mode]
    settings = Settings(Pace(expert=asked, adapter=asked, vlm=asked, deadline=1.0), plan)
    worker = partial(Delayed, clock=clock, latency=lambda request: under.delay / 1000)
    drive = Session(robot, watched, clock, worker, settings).drive()
    ended = list(_episodes(robot, drive, seeds, look))
    # what warmed up is not counted
    return ended, [1000 * each for each in watched.seconds[1:]]


def _episodes(robot: MetaWorld, drive: Drive, seeds: Sequence[int], look: Callable[[MetaWorld], None]) -> Iterator[Ended]:
    for number, seed in enumerate(seeds):
        if number:
            drive.reset()
        robot.begin(seed)
        if not number:
            drive.warm_up()
        yield _episode(robot, drive, seed, look)


def _episode(robot: MetaWorld, drive: Drive, seed: int, look: Callable[[MetaWorld], None]) -> Ended:
    before, still, unsafe, seen = torch.zeros(3, dtype=torch.float64), 0, robot.unsafe, robot.seen
    # ticks in front of the first command count, too: nothing may wait for ever
    for _ in range(LONGEST + _STALLED):
        drive.step()
        look(robot)
        seen = robot.seen
        assert seen is not None, "an episode has begun"
        hand = torch.from_numpy(seen.hand[:3])
        moved = bool((hand - before).norm() > _MOVED)
        before, still = (hand, 0) if moved else (before, still + 1)
        if seen.done or seen.step >= LONGEST or still >= _STALLED:
            break
    assert seen is not None, "an episode has begun"
    return Ended(seed, seen.done, seen.step, still >= _STALLED, robot.unsafe - unsafe)
