"""What a world model remembers of what left its view: a drawn first frame, a way out and straight back, and the frame there.

The window goes so far that nothing of the first frame is seen, waits there, and comes back; the last frame is held against the first one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.apps.train_video.roam import PIXELS, seen, settled
from mmsdk.diffusion.imagine import pixels
from mmsdk.diffusion.world.door import World
from mmsdk.diffusion.world.memory import Paging
from mmsdk.diffusion.world.model import WorldModel, open_world_model
from mmsdk.vision.types import Image

__all__ = ["Returned", "returned", "ways"]

_SEED = 7_000_003
_OUT = 5  # strides, of which four are the width of the window
_BACK = {"left": "right", "right": "left", "up": "down", "down": "up"}


@dataclass(frozen=True, slots=True)
class Returned:
    """Of so many returns: the mean squared error against the first frame, and that of a picture of nothing but ground."""

    clips: int
    error: float
    empty: float

    @property
    def recall(self) -> float:
        """How much of what was there is there again: 1 is all of it, 0 no more than bare ground."""
        return 1 - self.error / self.empty

    def row(self) -> dict[str, float | int | str]:
        """For a log."""
        return {"of": "returns", "clips": self.clips, "error": round(self.error, 5), "recall": round(self.recall, 4)}


def ways(number: int, waiting: int) -> Sequence[str]:
    """Out in one of four directions, to and fro there for as long, and straight back."""
    out = list(_BACK)[number % len(_BACK)]
    aside = list(_BACK)[(number + 2) % len(_BACK)]
    there = [aside if step % 2 == 0 else _BACK[aside] for step in range(waiting - waiting % 2)]
    return [*[out] * _OUT, *there, *[_BACK[out]] * _OUT]


def returned(
    model: Path | WorldModel, clips: int, paging: Paging = Paging(), waiting: int = 8, steps: int | None = None, folder: Path | None = None
) -> Returned:
    """Returns of so many worlds, one after the other."""
    opened = open_world_model(model) if isinstance(model, Path) else model
    errors, empties = list[float](), list[float]()
    with World(opened, pages=paging, folder=folder) as world:
        for number in range(clips):
            first = _first(number)
            world.reset(number, Image(pixels(first)[0]), steps=steps)
            for action in ways(number, waiting):
                frame = world.step(action)
            back = frame.pixels.float() / 127.5 - 1
            errors.append(float((back - first[:, 0]).square().mean()))
            empties.append(float((first[:, 0] - first.flatten(1).median(1).values[:, None, None]).square().mean()))
    return Returned(clips, sum(errors) / clips, sum(empties) / clips)


def _first(number: int) -> Float[Tensor, "3 1 h w"]:
    """The first frame of a held-out world."""
    generator = torch.Generator().manual_seed(_SEED + number)
    return seen(settled(1, generator), torch.zeros(1, 1, 2), PIXELS)[0]
