"""One Meta-World task in MuJoCo, in a process of its own, which `mmsdk.apps.web.arm` begins: `-m mmsdk.apps.web.arena TASK SEED SIZE`.

It is one of its own because under OSMesa only one renderer of a process draws, and MuJoCo decides at its import what it draws with. It
reads orders from stdin and writes what came of them to stdout, pickled:

    ("act", action)   one step of the simulation      -> Seen
    ("plan", step, n) what the expert would do now    -> Planned, with the number n
    ("look",)         nothing but a look              -> Seen
    ("begin",)        the next episode                -> Seen

The expert is Meta-World's own script of the task, which reads the simulation's state and no picture. It plays forward in the simulation
itself, which is then put back to where it was.
"""

import copy
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import BinaryIO

import gymnasium
import metaworld  # noqa: F401  (its import is what adds the environments to gymnasium)
import mujoco
import numpy as np
from jaxtyping import Float, UInt8
from metaworld.policies import ENV_POLICY_MAP

from mmsdk.apps.web.orders import HORIZON, LIMIT, Planned, Seen

__all__ = ["Arena", "main"]

REMEMBERED = ("_prev_obs", "_last_stable_obs", "curr_path_length")
"""What an environment keeps beside MuJoCo's own state."""
VIEW = ((-0.02, 0.56, 0.16), 1.4, 132.0, -26.0)
"""Where the camera looks, from how many metres away, and its azimuth and elevation in degrees."""


class Arena:
    """The simulation, its renderer, and the expert."""

    def __init__(self, task: str, seed: int, size: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gymnasium remarks on Meta-World's own spaces
            self._maker = gymnasium.make("Meta-World/MT1", env_name=f"{task}-v3", seed=seed)
        self._env = self._maker.unwrapped
        self._model, self._data = self._env.model, self._env.data
        self._expert = ENV_POLICY_MAP[f"{task}-v3"]()
        # both before the GL context exists: 5 to 12 times faster
        self._model.vis.quality.shadowsize = self._model.vis.quality.offsamples = 0
        self._renderer = mujoco.Renderer(self._model, size, size)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._renderer.scene.flags[flag] = 0
        self._camera = mujoco.MjvCamera()
        self._camera.lookat[:], self._camera.distance, self._camera.azimuth, self._camera.elevation = VIEW
        self._episode, self._seed = 0, seed

    def begin(self) -> Seen:
        """The next episode: things lie elsewhere."""
        self._episode += 1
        self._done, self._acts = False, list[np.ndarray]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._state, _ = self._maker.reset(seed=self._seed + self._episode)
        return self.look()

    def act(self, action: Float[np.ndarray, "4"]) -> Seen:
        """One step; nothing more happens once its time is up."""
        if len(self._acts) < LIMIT:
            self._state, _, _, _, info = self._env.step(action.astype(np.float32))
            self._done = self._done or bool(info["success"])
            self._acts.append(action)
        return self.look()

    def plan(self, step: int, number: int) -> Planned:
        """What was done since a step, and what the expert would do from now on, under the number of the order."""
        before = np.empty(mujoco.mj_stateSize(self._model, mujoco.mjtState.mjSTATE_INTEGRATION))
        mujoco.mj_getState(self._model, self._data, before, mujoco.mjtState.mjSTATE_INTEGRATION)
        kept = {name: copy.deepcopy(getattr(self._env, name)) for name in REMEMBERED}
        state, actions = self._state, list[np.ndarray]()
        for _ in range(HORIZON):
            actions.append(np.clip(self._expert.get_action(state), -1, 1).astype(np.float64))
            state = self._env.step(actions[-1].astype(np.float32))[0]
        mujoco.mj_setState(self._model, self._data, before, mujoco.mjtState.mjSTATE_INTEGRATION)
        mujoco.mj_forward(self._model, self._data)
        vars(self._env).update(kept)
        return Planned(np.stack([*self._acts[step:], *actions]), number)

    def close(self) -> None:
        """Give the GL context back."""
        self._renderer.close()
        self._maker.close()

    def look(self) -> Seen:
        """What there is to be seen."""
        captured = time.monotonic()
        self._renderer.update_scene(self._data, self._camera)
        pixels: UInt8[np.ndarray, "h w 3"] = self._renderer.render()
        steps = len(self._acts)
        return Seen(pixels, np.array(self._state[:4], np.float64), captured, self._episode, steps, self._done, steps >= LIMIT)


def main(words: Sequence[str]) -> None:
    """Answer orders until there are none. What libraries print goes to stderr."""
    task, seed, size = words
    told = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    arena = Arena(task, int(seed), int(size))
    orders: dict[str, Callable[..., Seen | Planned]] = {
        "act": arena.act,
        "plan": arena.plan,
        "look": arena.look,
        "begin": arena.begin,
    }
    _tell(told, arena.begin())
    try:
        while True:
            name, *given = pickle.load(sys.stdin.buffer)
            _tell(told, orders[name](*given))
    except (EOFError, BrokenPipeError):
        arena.close()


def _tell(out: BinaryIO, what: Seen | Planned) -> None:
    pickle.dump(what, out)
    out.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
