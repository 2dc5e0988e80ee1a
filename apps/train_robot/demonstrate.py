"""Demonstrations of one task by Meta-World's script, through the gate that the policy will run behind: a program, for it renders.

`python -m mmsdk.apps.train_robot.demonstrate TASK SEED COUNT SCENES PATH` writes a safetensors file.

What is done is not quite what the script wants: in half of the demonstrations the hand is pushed aside now and then, so that ways back are
seen, too. What is kept as the action is what the script wanted, in each state that it really came to (as in DART, Laskey et al., arXiv
1703.09327). Beside them come SCENES with things elsewhere, of which only two looks are kept and no action: what is seen is learned from
more places than what is done.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.apps.train_robot.demonstrations import Demonstration, save
from mmsdk.errors import ModelError
from mmsdk.vla.envs.metaworld import STEP, sawyer
from mmsdk.vla.envs.metaworld_stage import Stage
from mmsdk.vla.gate import Gate

__all__ = ["EVERY", "demonstrate", "main"]

EVERY = 5
"""A picture each so many steps; the steps in between are only actions."""
LONGEST = 300
LINGER = 6
ATTEMPTS = 4
"""Of a thousand seeds each, all below the 10,000 that divide demonstrations from what is held out."""
SCENES, SCENE_STEPS = 5_000, 60
"""The first seed of scenes, and the steps before their second look, at most."""
PUSHED, PUSH_STEPS, PUSH = 0.03, 6, 0.9
SHAKEN = 0.1


def demonstrate(stage: Stage, seed: int, every: int = EVERY) -> Demonstration | None:
    """One demonstration, a pure function of the seed; None where the script did not get there."""
    rng = np.random.default_rng((seed, 1))
    stage.begin(seed)
    gate = Gate(sawyer())
    gate.start(torch.from_numpy(stage.hand))
    pushes = bool(rng.random() < 0.5)
    left, aside, after = 0, np.zeros(3), 0
    pictures, taken, rows = list[Tensor](), list[int](), list[np.ndarray]()
    first = int(rng.integers(every))
    for step in range(LONGEST):
        if step % every == first or step == 0:
            pictures.append(torch.from_numpy(stage.look()))
            taken.append(step)
        advice = stage.advice()
        rows.append(np.concatenate((stage.hand, advice, stage.places)))
        if pushes and not left and rng.random() < PUSHED:
            left, aside = PUSH_STEPS, _direction(rng) * PUSH
        wanted = advice[:3] + rng.normal(0, SHAKEN, 3) * pushes + aside * (left > 0)
        left = max(0, left - 1)
        command = gate.towards(in_contract(np.append(np.clip(wanted, -1, 1), advice[3]))).command.numpy()
        stage.act(np.append(command[:3] / STEP, command[3]))
        gate.measure(torch.from_numpy(stage.hand))
        after += stage.done
        if after > LINGER:
            return _put_together(pictures, taken, np.stack(rows))
    return None


def scene(stage: Stage, seed: int) -> Demonstration:
    """Two looks, after a few steps of the script and then of chance, a pure function of the seed."""
    rng = np.random.default_rng((seed, 2))
    stage.begin(seed)
    pictures, rows = list[Tensor](), list[np.ndarray]()
    for steps in rng.integers(0, SCENE_STEPS, 2) // 2:
        aside = _direction(rng)
        for step in range(int(steps)):
            advice = stage.advice()
            stage.act(np.append(aside, rng.uniform(-1, 1)) if step > steps - PUSH_STEPS else advice)
        pictures.append(torch.from_numpy(stage.look()))
        rows.append(np.concatenate((stage.hand, np.zeros(4), stage.places)))
    return replace(_put_together(pictures, range(len(rows)), np.stack(rows)), acted=False)


def in_contract(action: Float[np.ndarray, "4"]) -> Float[Tensor, "4"]:
    """An action of the simulation's, from -1 to 1, in the contract's units."""
    return torch.from_numpy(action * np.array([STEP, STEP, STEP, 1.0]))


def _direction(rng: np.random.Generator) -> Float[np.ndarray, "3"]:
    way = rng.normal(size=3)
    out: np.ndarray = way / np.linalg.norm(way)
    return out


def _put_together(pictures: Sequence[Tensor], taken: Sequence[int], rows: np.ndarray) -> Demonstration:
    steps = torch.from_numpy(rows).float()
    scale = torch.tensor([STEP, STEP, STEP, 1.0])
    return Demonstration(torch.stack(list(pictures)), torch.tensor(taken), steps[:, :4], steps[:, 4:8] * scale, steps[:, 8:])


def main(words: Sequence[str]) -> None:
    """Write COUNT demonstrations, whole or not at all. Raises ModelError where the script fails too often for that."""
    task, path = words[0], Path(words[4])
    seed, count, scenes = map(int, words[1:4])
    stage = Stage(task)
    made = [scene(stage, seed + SCENES + number) for number in range(scenes)]
    for number in range(count):
        tries = (demonstrate(stage, seed + number + 1000 * attempt) for attempt in range(ATTEMPTS))
        found = next((each for each in tries if each is not None), None)
        if found is None:
            raise ModelError(f"{task}: {ATTEMPTS} tries of the script gave no success; is metaworld 3.1.1 installed?")
        made.append(found)
    stage.close()
    save(made, path)


if __name__ == "__main__":
    main(sys.argv[1:])
