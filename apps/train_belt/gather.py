"""Demonstrations of the script in the simulation: `python -m mmsdk.apps.train_belt.gather FILE EPISODES SEED`, off screen.

The file holds, for each episode, what the camera shows at every decision (the late picture), the state before and the command of every
step, which steps count, and what the eyes are taught with: where the things are in the picture and what the lamp shows. Commands that are
carried out differ from those that are written down in half of the episodes: for a few steps after its release the hand is led astray, so
that what is learnt includes arriving late. Episodes in which the script fails are kept out.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mmsdk.apps.kept import write
from mmsdk.vla.envs.belt import CHUNK, LIMIT
from mmsdk.vla.envs.fetch_belt import FetchBelts, Stage, draw
from mmsdk.vla.envs.fetch_expert import expert
from mmsdk.vla.envs.fetch_scene import View
from mmsdk.vla.envs.fetch_sizes import CENTRE

__all__ = ["gather", "main"]

_TOGETHER = 50
_LINGER = 4
_ASTRAY = 8
_ASIDE = 0.05


def gather(count: int, seed: int) -> dict[str, Tensor]:
    """So many demonstrations, half of them of each task; the same ones for the same seed."""
    stage, generator = Stage.made(), torch.Generator().manual_seed(seed)
    view, found, have = View(stage.model), list[dict[str, Tensor]](), 0
    while have < count:
        episodes = draw(torch.rand(min(_TOGETHER, count), generator=generator) < 0.5, generator)
        found.append(_demonstrated(FetchBelts(stage, episodes), view, generator))
        have += len(found[-1]["states"])
        print(f"{have} of {count} demonstrations", file=sys.stderr, flush=True)
    view.close()
    return {name: torch.cat([part[name] for part in found])[:count].contiguous() for name in found[0]}


def _demonstrated(belts: FetchBelts, view: View, generator: torch.Generator) -> dict[str, Tensor]:
    """What the script does in these episodes, of those in which it picks the right thing."""
    n, episodes = len(belts), belts.episodes
    astray = torch.randint(-_ASTRAY, _ASTRAY, (n,), generator=generator)
    aside = torch.randn(n, 3, generator=generator) * _ASIDE
    since, told = torch.zeros(n), list[dict[str, Tensor]]()
    pictures, places, lamps = list[Tensor](), list[Tensor](), list[Tensor]()
    for step in range(LIMIT):
        if step % CHUNK == 0:
            pictures.append(((belts.pictures(view) + 1) * 127.5).round().to(torch.uint8))
            places.append(belts.shown[..., :2] - torch.tensor(CENTRE))
            lamps.append(belts.lamps)
        action = expert(belts)
        led = (step >= episodes.go) & (step < episodes.go + astray)
        # a plan that is made as the arm is released cannot know that it will be led astray
        foreseen = (astray <= 0) | (step < episodes.go) | (step >= episodes.go + CHUNK)
        told.append({"states": belts.state(), "actions": action, "counts": (since < _LINGER) & foreseen})
        wrong = torch.cat((action[:, :3] + aside, torch.full((n, 1), -1.0)), dim=1)
        belts.apply(torch.where(led[:, None], wrong, action))
        since = since + (~belts.running).float()
    kept = torch.tensor([way == "picked" for way in belts.outcome])
    steps = {name: torch.stack([one[name] for one in told], dim=1)[kept] for name in told[0]}
    seen = {"pictures": torch.stack(pictures, dim=1)[kept], "places": torch.stack(places, dim=1)[kept]}
    drawn = {"go": episodes.go[kept], "cued": episodes.cued[kept], "there": episodes.there[kept]}
    return {**steps, **seen, "lamps": torch.stack(lamps, dim=1)[kept], **drawn}


def main(words: Sequence[str]) -> None:
    """Write the file, whole or not at all."""
    path, count, seed = Path(words[0]), int(words[1]), int(words[2])
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, gather(count, seed), {"count": words[1], "seed": words[2]})


if __name__ == "__main__":
    main(sys.argv[1:])
