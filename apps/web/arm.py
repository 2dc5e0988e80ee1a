"""The demo's robot in a real simulation: a Sawyer arm in MuJoCo, in Meta-World's tasks, behind the `Robot` protocol.

What runs the simulation is another process (`mmsdk.apps.web.arena`); here is what is known of it: the newest pictures and state, and a way
to send the next command. Two policies can drive it: the one that ships (`mmsdk.vla.default`), which sees what its two cameras show and is
told in words, and Meta-World's own script of each task, which reads the simulation's state. 20 commands a second are one simulated step
each, and a step is an 80th of a second: a quarter of real speed.
"""

import pickle
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mmsdk.apps.train_mini.needs import screenless
from mmsdk.apps.web.orders import Planned, Seen
from mmsdk.errors import InputError, ModelError
from mmsdk.vision.types import Image
from mmsdk.vla.contract import Contract
from mmsdk.vla.envs.metaworld import CAMERAS, RATE, STEP, TASKS, sawyer
from mmsdk.vla.types import ActionChunk, Observation, Request, Stamp

__all__ = ["Arm", "ArmScene", "Expert"]

SIZE = 320  # pixels of the page's picture
ANSWER = 10.0  # seconds that a plan is waited for
SEEN = 64  # observations whose steps are known


@dataclass(frozen=True, slots=True)
class ArmScene:
    """What the page shows of the simulation beside its numbers."""

    pixels: UInt8[np.ndarray, "h w 3"]
    step: int


class Arm:
    """One simulation and its newest observation. `close` ends the process; it ends, too, when this program does."""

    success = "done"

    def __init__(self, task: str, seed: int) -> None:
        """Raises InputError for a task that is not known."""
        if task not in TASKS:
            raise InputError(f"there is no {task!r}; there is {', '.join(TASKS)}", item="task")
        self._task, self._contract = task, sawyer()
        command = [sys.executable, "-m", "mmsdk.apps.web.arena", task, str(seed), str(SIZE)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=screenless())
        self._lock = Lock()
        self._newest: Seen | None = None
        self._observed: Observation | None = None
        self._steps: deque[tuple[float, int]] = deque(maxlen=SEEN)
        self._waiting: list[tuple[Any, ...]] = []
        self._free, self._ended, self._episode = False, False, 1
        self._plans: SimpleQueue[Planned] = SimpleQueue()
        self._asked = 0
        self._words: deque[str] = deque(maxlen=1)
        self._threads = [Thread(target=each, name="arm", daemon=True) for each in (self._read, self._listen)]
        for thread in self._threads:
            thread.start()

    @property
    def contract(self) -> Contract:
        """See `Robot`."""
        return self._contract

    @property
    def over(self) -> bool:
        """Whether the episode has ended: the task is done, or time is up."""
        seen = self._newest
        return seen is not None and (seen.done or seen.over)

    @property
    def outcome(self) -> str:
        """How it ended; "" while it goes on."""
        seen = self._newest
        return "" if seen is None else self.success if seen.done else "out of time" if seen.over else ""

    def scene(self) -> ArmScene:
        """What there is to be seen. Only once something was observed."""
        assert self._newest is not None, "something was observed"
        return ArmScene(self._newest.pixels, self._newest.step)

    def begin(self) -> None:
        """The next episode: things lie elsewhere. What comes of orders given before is not looked at any more."""
        with self._lock:
            self._episode += 1
            self._newest = self._observed = None
            # a plan that somebody waits for is still made
            self._waiting = [order for order in self._waiting if order[0] == "plan"]
            self._order("begin")

    def observe(self) -> Observation:
        """See `Robot`. Raises ModelError where the simulation has ended."""
        with self._lock:
            if self._ended:
                raise ModelError(f"the simulation ended: {''.join(self._words) or 'it said nothing'}")
            newest, observed = self._newest, self._observed
            if newest is not None and self._free and time.monotonic() - newest.captured > 1.5 / RATE:
                # while nothing is sent, as before the first command, nothing else would show that it still stands there
                self._order("look")
        if observed is None:
            raise InputError("nothing was seen yet", item="arm")
        return observed

    def apply(self, action: Float[Tensor, " a"]) -> None:
        """See `Robot`: one step of the simulation. One that it has not begun yet is replaced: a slow machine goes slower, and not late."""
        numbers = np.append(action[:3].numpy() / STEP, float(action[3]))
        with self._lock:
            self._waiting = [order for order in self._waiting if order[0] != "act"]
            self._order("act", numbers)

    def plan(self, moment: float) -> Float[Tensor, "h a"]:
        """What the expert does from a moment on, as actions of the contract. Raises ModelError where no answer comes."""
        with self._lock:
            step = next((step for captured, step in self._steps if captured == moment), -1)
            if step < 0:
                raise ModelError("the observation is of too long ago to be planned for")
            while not self._plans.empty():
                self._plans.get()
            self._asked += 1
            self._order("plan", step, self._asked)
        try:
            planned = self._plans.get(timeout=ANSWER)
        except Empty:
            raise ModelError(f"the expert gave no plan within {ANSWER:.0f} s") from None
        return torch.from_numpy(planned.actions * np.array([STEP, STEP, STEP, 1.0]))

    def close(self) -> None:
        """End the process."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None, "all are pipes"
        with self._lock, suppress(BrokenPipeError):
            self._ended = True
            process.stdin.close()
        try:
            process.wait(timeout=ANSWER)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for thread in self._threads:
            thread.join()
        process.stdout.close()
        process.stderr.close()

    def _order(self, *order: Any) -> None:
        """Send an order, or keep it until the one before is answered. The lock is held."""
        self._waiting.append(order)
        if self._free:
            self._next()

    def _next(self) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        self._free = not self._waiting
        if self._waiting and not self._ended:
            try:
                pickle.dump(self._waiting.pop(0), self._process.stdin)
                self._process.stdin.flush()
            except BrokenPipeError:
                self._ended = True

    def _read(self) -> None:
        """Take in what the simulation tells, until it ends."""
        assert self._process.stdout is not None, "it is a pipe"
        while True:
            try:
                came = pickle.load(self._process.stdout)
            except (EOFError, pickle.UnpicklingError):
                break
            with self._lock:
                self._take(came)
                self._next()
        with self._lock:
            self._ended = True

    def _take(self, came: Seen | Planned) -> None:
        if isinstance(came, Planned):
            # one that comes too late is nobody's answer
            if came.number == self._asked:
                self._plans.put(came)
        elif came.episode == self._episode:
            self._newest = came
            if came.views is not None:
                images = {name: Image(pixels, name) for name, pixels in zip(CAMERAS, torch.from_numpy(came.views), strict=True)}
                self._observed = Observation(images, torch.from_numpy(came.hand), TASKS[self._task][0], Stamp(came.captured))
                self._steps.append((came.captured, came.step))

    def _listen(self) -> None:
        """Keep the last line that it says of itself: why it ended, where it did."""
        assert self._process.stderr is not None, "it is a pipe"
        for line in self._process.stderr:
            if line.strip():
                self._words.append(line.decode(errors="replace").strip())


@dataclass(slots=True)
class Expert:
    """Meta-World's script of the task as a policy."""

    arm: Arm

    def reset(self, episode: int) -> None:
        """See `Policy`: nothing is remembered."""

    def __call__(self, request: Request) -> ActionChunk:
        """See `Policy`."""
        stamp = request.observation.stamp
        return ActionChunk(self.arm.plan(stamp.captured), stamp, "Meta-World's script")
