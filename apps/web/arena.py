"""One Meta-World task in MuJoCo, in a process of its own, which `mmsdk.apps.web.arm` begins: `-m mmsdk.apps.web.arena TASK SEED SIZE`.

It is one of its own because under OSMesa only one renderer of a process draws, and MuJoCo decides at its import what it draws with. It
reads orders from stdin and writes what came of them to stdout, pickled:

    ("act", action)   one step of the simulation      -> Seen
    ("plan", step, n) what the expert would do now    -> Planned, with the number n
    ("look",)         nothing but a look              -> Seen
    ("begin",)        the next episode                -> Seen

The simulation is the one that the policy was trained in (`mmsdk.vla.envs.metaworld_stage`), seen by one more camera, that of the page.
"""

import sys
import time
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from mmsdk.apps.web.orders import HORIZON, LIMIT, Planned, Seen
from mmsdk.vla.envs.metaworld_canvas import camera
from mmsdk.vla.envs.metaworld_stage import Stage, answer, outlet, tell

__all__ = ["Arena", "main"]

VIEW = ((-0.02, 0.56, 0.16), 1.4, 132.0, -26.0)
"""Where the page's camera looks, from how many metres away, and its azimuth and elevation in degrees."""
EVERY = 3
"""Steps between two pictures of the policy's cameras, which are slower than commands."""


class Arena:
    """The simulation, the page's camera, and what was done in this episode."""

    def __init__(self, task: str, seed: int, size: int) -> None:
        self._stage, self._size, self._camera = Stage(task, size), size, camera(*VIEW)
        self._episode, self._seed = 0, seed

    def begin(self) -> Seen:
        """The next episode: things lie elsewhere."""
        self._episode += 1
        self._acts = list[np.ndarray]()
        self._stage.begin(self._seed + self._episode)
        return self.look()

    def act(self, action: Float[np.ndarray, "4"]) -> Seen:
        """One step; nothing more happens once its time is up."""
        if len(self._acts) < LIMIT:
            self._stage.act(action)
            self._acts.append(action)
        return self.look(len(self._acts) % EVERY == 0)

    def plan(self, step: int, number: int) -> Planned:
        """What was done since a step, and what the expert would do from now on, under the number of the order."""
        return Planned(np.stack([*self._acts[step:], *self._stage.foreseen(HORIZON)]), number)

    def close(self) -> None:
        """Give the GL context back."""
        self._stage.close()

    def look(self, views: bool = True) -> Seen:
        """What there is to be seen, by the policy's cameras, too, where `views` says so."""
        captured, stage, steps = time.monotonic(), self._stage, len(self._acts)
        seen = stage.look() if views else None
        pixels = np.ascontiguousarray(stage.picture(self._camera, self._size))
        return Seen(pixels, seen, stage.hand, captured, self._episode, steps, stage.done, steps >= LIMIT)


def main(words: Sequence[str]) -> None:
    """Tell how it begins, then answer orders until there are none."""
    task, seed, size = words
    told, arena = outlet(), Arena(task, int(seed), int(size))
    tell(told, arena.begin())
    answer({"act": arena.act, "plan": arena.plan, "look": arena.look, "begin": arena.begin}, told)
    arena.close()


if __name__ == "__main__":
    main(sys.argv[1:])
