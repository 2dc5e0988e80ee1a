"""Meta-World's ten tasks MT10 (Yu et al., arXiv 1910.10897) behind the `Robot` protocol: a Sawyer arm in MuJoCo, seen by two cameras.

The simulation is another process (`mmsdk.vla.envs.metaworld_stage`), because under OSMesa only one renderer of a process draws, and MuJoCo
decides at its import what it draws with. It goes on by one step for each command, and stands still in between: time is the loop's own, a
`SimulatedClock`, and what is measured does not hang on the machine. Twenty commands a second are one simulated step each, and a step is an
80th of a second: a quarter of real speed.

The policy is told where the hand is and how far its fingers are open; where things lie it can only see. One camera stands beside the
table, the other travels with the hand and looks from the other side. Both take a picture in every `every`-th step, as slower sensors
would; an observation is what there was when the newest pictures were taken, the hand included, and says so by its stamp.
"""

import ctypes.util
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError, ModelError
from mmsdk.vision.types import Image
from mmsdk.vla.clock import Clock
from mmsdk.vla.contract import Camera, Command, Contract, Feature, Timing
from mmsdk.vla.envs.metaworld_orders import SIDE, Seen
from mmsdk.vla.types import Observation, Stamp

__all__ = ["CAMERAS", "RATE", "STEP", "TASKS", "MetaWorld", "missing", "sawyer"]

TASKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "reach-v3": ("reach the target", "move the hand to the target", "go to the target"),
        "push-v3": ("push the puck to the target", "slide the puck to the target", "move the puck along the table to the target"),
        "pick-place-v3": ("bring the puck to the target", "pick up the puck and hold it at the target", "lift the puck to the target"),
        "door-open-v3": ("open the door", "pull the door open", "swing the door open"),
        "drawer-open-v3": ("open the drawer", "pull the drawer open", "slide the drawer out"),
        "drawer-close-v3": ("close the drawer", "push the drawer shut", "slide the drawer in"),
        "button-press-topdown-v3": ("press the button", "push the button down", "press the button from above"),
        "peg-insert-side-v3": ("insert the peg into the hole", "put the peg into the hole of the box", "push the peg into the box"),
        "window-open-v3": ("open the window", "slide the window open", "push the window open"),
        "window-close-v3": ("close the window", "slide the window shut", "push the window shut"),
    }
)
"""MT10 by Meta-World's own names: how each is told, the first way being the usual one."""
RATE = 20
"""Commands a second."""
STEP = 0.01
"""Metres that the hand goes in one step, at most."""
CAMERAS = ("side", "hand")
_ANSWER = 10.0


def missing() -> str:
    """What the simulation lacks here, and the fix; "" where nothing is known to be lacking."""
    if any(importlib.util.find_spec(package) is None for package in ("metaworld", "mujoco", "gymnasium")):
        return "pip install '.[robots]' in the clone"
    # what draws without a screen, unless something else is named
    return "" if os.environ.get("MUJOCO_GL") or ctypes.util.find_library("OSMesa") else "apt install libosmesa6"


def sawyer() -> Contract:
    """Steps of the hand in metres along three axes, and the fingers; the hand's range is wider than the simulation's own by the lag."""
    hand = Feature("hand", "position", 3, "m", (-0.65, 0.25, -0.15), (0.65, 1.15, 0.8))
    fingers = Feature("fingers", "gripper", 1, "fraction", (0.0,), (1.0,), opened=1.0, closed=0.0)
    way = Feature("step", "position", 3, "m", (-STEP,) * 3, (STEP,) * 3)
    grip = Feature("grip", "gripper", 1, "one", (-1.0,), (1.0,), opened=-1.0, closed=1.0)
    commands = (
        Command(way, "position", "step", "hand", speed=STEP * RATE, acceleration=2.0, jerk=60.0, lag=0.08),
        Command(grip, "position", "absolute", "fingers"),
    )
    cameras = tuple(Camera(name, SIDE, SIDE, "rgb", "chw") for name in CAMERAS)
    # a picture stands still while the hand waits for its fingers
    return Contract("Sawyer arm of Meta-World", float(RATE), cameras, (hand, fingers), commands, timing=Timing(stale=0.5, frozen=60.0))


class MetaWorld:
    """One task and its newest observation, in the time of `clock`. `close`, or the end of a `with`, ends the process behind it.

    `current` is the seed of the episode. `unsafe` counts the commands that no robot of this contract should ever be sent: not finite, or
    out of range. None is executed.
    """

    def __init__(self, task: str, clock: Clock, every: int = 3) -> None:
        """Raises InputError for a task that is not known."""
        if task not in TASKS:
            raise InputError(f"there is no {task!r}; there is {', '.join(TASKS)}", item="task")
        self.task, self.instruction, self.unsafe, self.current = task, TASKS[task][0], 0, 0
        self._clock, self._every, self._contract = clock, every, sawyer()
        command = [sys.executable, "-m", "mmsdk.vla.envs.metaworld_stage", task]
        environment = {**os.environ, "MUJOCO_GL": os.environ.get("MUJOCO_GL", "osmesa")}
        # a file: nobody reads what the simulation says of itself before it has ended
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, env=environment)
        features = [each.feature for each in self._contract.action]
        self._low, self._high = (torch.tensor(ends).double() for ends in _ends(features))
        self._images: dict[str, Image] = {}
        self._hand = torch.zeros(4, dtype=torch.float64)
        self._captured, self._moved = 0.0, False
        self.seen: Seen | None = None

    @property
    def contract(self) -> Contract:
        """See `Robot`."""
        return self._contract

    def begin(self, seed: int) -> None:
        """Another episode, the same one for the same seed. Seeds below 10,000 are those of demonstrations."""
        self.current = seed
        self._take(self._ordered("begin", seed))

    def observe(self) -> Observation:
        """See `Robot`. Raises InputError before the first episode."""
        if not self._images:
            raise InputError("no episode has begun", item=self.task)
        if not self._moved:
            # the simulation stands still: what was seen is so now
            self._captured = self._clock.now()
        return Observation(dict(self._images), self._hand, self.instruction, Stamp(self._captured))

    def apply(self, action: Float[Tensor, " a"]) -> None:
        """See `Robot`: one step of the simulation."""
        # NaN fails these comparisons, as it should
        if not bool((action >= self._low - 1e-9).all() & (action <= self._high + 1e-9).all()):
            self.unsafe += 1
            return
        assert self.seen is not None, "an episode has begun"
        look = (self.seen.step + 1) % self._every == 0
        self._moved = True
        self._take(self._ordered("act", np.append(action[:3].numpy() / STEP, float(action[3])), look))

    def close(self) -> None:
        """End the process."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        process.stdin.close()
        try:
            process.wait(timeout=_ANSWER)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        self._words.close()

    def __enter__(self) -> "MetaWorld":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ordered(self, *order: object) -> Seen:
        """Give an order and wait for what comes of it. Raises ModelError, with its last words, where the simulation has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        try:
            pickle.dump(order, self._process.stdin)
            self._process.stdin.flush()
            seen = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            self._process.wait(timeout=_ANSWER)
            self._words.seek(0)
            words = self._words.read().decode(errors="replace").strip().splitlines()
            raise ModelError(f"the simulation ended: {words[-1] if words else 'it said nothing'}") from None
        assert isinstance(seen, Seen), "the stage says nothing else"
        return seen

    def _take(self, seen: Seen) -> None:
        self.seen = seen
        if seen.pictures is not None:
            pixels = torch.from_numpy(seen.pictures)
            self._images = {name: Image(each, name) for name, each in zip(CAMERAS, pixels, strict=True)}
            self._hand, self._moved = torch.from_numpy(seen.hand), False


def _ends(features: Sequence[Feature]) -> tuple[list[float], list[float]]:
    """The ranges of all numbers of these features, one after the other."""
    return [end for each in features for end in each.low], [end for each in features for end in each.high]
