"""The simulation behind `mmsdk.vla.envs.metaworld`, as a program of its own: `python -m mmsdk.vla.envs.metaworld_stage TASK`.

It reads orders from stdin and writes what came of them to stdout, pickled: ("begin", seed) and ("act", action, look), each answered by a
`Seen`. Actions are the simulation's own, from -1 to 1. `Stage` is also what demonstrations are collected on and what the demo's page
shows; its expert is Meta-World's own script of the task, which reads the simulation's state and no picture.
"""

import copy
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

import mujoco
import numpy as np
from jaxtyping import Float, UInt8
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
from metaworld.policies import ENV_POLICY_MAP

from mmsdk.vla.envs.metaworld_canvas import Canvas, camera
from mmsdk.vla.envs.metaworld_orders import SIDE, Seen

__all__ = ["Stage", "answer", "main", "outlet", "tell"]

LIMIT = 480
"""Steps of an episode; Meta-World's own end is at 500."""
_FIXED = ((0.0, 0.68, 0.1), 1.25, 135.0, -32.0)
_TRAVELLING = ((0.0, 0.07, -0.04), 0.62, 48.0, -38.0)
"""Where a camera looks (in metres of the room, and of the hand), from how many metres away, its azimuth and elevation in degrees."""
_REMEMBERED = ("_prev_obs", "_last_stable_obs", "curr_path_length")
"""What an environment keeps beside MuJoCo's own state."""


class Stage:
    """One task, its cameras and its expert. `largest` is how many pixels square a picture of it may be."""

    def __init__(self, task: str, largest: int = SIDE) -> None:
        self._env = ALL_V3_ENVIRONMENTS[task]()
        self._expert = ENV_POLICY_MAP[task]()
        # goals are told to the expert, and drawn anew in each episode from the seed it begins with
        self._env._partially_observable = self._env._freeze_rand_vec = False
        del self._env.sawyer_observation_space
        self._env._set_task_called = self._env.seeded_rand_vec = True
        self._canvas = Canvas(self._env.model, largest)
        self._done, self._steps = False, 0
        self.state: Float[np.ndarray, "39"] = np.zeros(39)

    @property
    def hand(self) -> Float[np.ndarray, "4"]:
        """Where the hand is, in metres, and how far its fingers are open, from 0 to 1."""
        return self.state[:4].astype(np.float64)

    @property
    def places(self) -> Float[np.ndarray, "6"]:
        """Where the task's thing is, and its goal: what no policy is told."""
        both: np.ndarray = np.concatenate((self.state[4:7], self.state[36:39]))
        return both

    @property
    def done(self) -> bool:
        """Whether the task was done at any step."""
        return self._done

    @property
    def steps(self) -> int:
        """Steps that were taken."""
        return self._steps

    def begin(self, seed: int) -> None:
        """Another episode, a pure function of the seed."""
        self._done, self._steps = False, 0
        self._env.seed(seed)
        self.state, _ = self._env.reset()

    def act(self, action: Float[np.ndarray, "4"]) -> None:
        """One step; nothing more happens once its time is up."""
        if self._steps < LIMIT:
            self.state, _, _, _, info = self._env.step(action.astype(np.float32))
            self._done = self._done or bool(info["success"])
            self._steps += 1

    def advice(self) -> Float[np.ndarray, "4"]:
        """What the expert would do now."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it remarks on its own numbers being clipped
            advice: np.ndarray = np.clip(self._expert.get_action(self.state), -1, 1).astype(np.float64)
        return advice

    def foreseen(self, steps: int) -> Float[np.ndarray, "h 4"]:
        """What the expert would do from now on. It plays forward in the simulation itself, which is then put back to where it was."""
        env, kind = self._env, mujoco.mjtState.mjSTATE_INTEGRATION
        before, state = np.empty(mujoco.mj_stateSize(env.model, kind)), self.state
        mujoco.mj_getState(env.model, env.data, before, kind)
        kept = {name: copy.deepcopy(getattr(env, name)) for name in _REMEMBERED}
        actions = list[np.ndarray]()
        for _ in range(steps):
            actions.append(self.advice())
            self.state = env.step(actions[-1].astype(np.float32))[0]
        mujoco.mj_setState(env.model, env.data, before, kind)
        mujoco.mj_forward(env.model, env.data)
        vars(env).update(kept)
        self.state = state
        return np.stack(actions)

    def look(self) -> UInt8[np.ndarray, "c 3 h w"]:
        """A picture of each of the policy's cameras."""
        views = (camera(*_FIXED), camera(*_TRAVELLING, origin=self.state[:3]))
        return np.stack([np.ascontiguousarray(self.picture(view, SIDE).transpose(2, 0, 1)) for view in views])

    def picture(self, view: "mujoco.MjvCamera", side: int) -> UInt8[np.ndarray, "h w 3"]:
        """What any camera sees, `side` pixels square."""
        return self._canvas(self._env.data, view, side)

    def seen(self, look: bool) -> Seen:
        """What there is to be told."""
        return Seen(self.hand, self._done, self._steps, self.look() if look else None)

    def close(self) -> None:
        """Give the GL context back."""
        self._canvas.close()
        self._env.close()


def main(words: Sequence[str]) -> None:
    """Answer orders until there are none."""
    (task,) = words
    told, stage = outlet(), Stage(task)

    def begin(seed: int) -> Seen:
        stage.begin(seed)
        return stage.seen(look=True)

    def act(action: Float[np.ndarray, "4"], look: bool) -> Seen:
        stage.act(action)
        return stage.seen(look)

    answer({"begin": begin, "act": act}, told)
    stage.close()


def outlet() -> BinaryIO:
    """stdout for answers alone: what libraries print goes to stderr from now on."""
    told = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return told


def answer(orders: Mapping[str, Callable[..., object]], told: BinaryIO) -> None:
    """Carry out what stdin orders by name, and tell what came of it, until there are no more orders or nobody listens."""
    try:
        while True:
            name, *given = pickle.load(sys.stdin.buffer)
            tell(told, orders[name](*given))
    except (EOFError, BrokenPipeError):
        return


def tell(told: BinaryIO, what: object) -> None:
    """Say one thing, at once."""
    pickle.dump(what, told)
    told.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
