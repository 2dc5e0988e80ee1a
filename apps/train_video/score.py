"""What the model is worth: clips of held-out sentences, read by the judge, and how their frames hold together."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmsdk.apps.train_video.judge import HELD_OUT_SEED, Judge, Reading
from mmsdk.apps.train_video.world import Stories, drawn, film
from mmsdk.diffusion.imagine import Imaginer

__all__ = ["Score", "asked", "score", "told"]

READ = ("colour", "shape", "direction", "relation", "box")


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of clips: each thing read right; colour, shape and direction all right; all five; and of frames that agree with their clip."""

    clips: int
    each: dict[str, float]
    three: float
    five: float
    steady: float

    def row(self, of: str) -> dict[str, str | float]:
        """For a log or a table."""
        return {"of": of, "clips": self.clips, **self.each, "three": self.three, "five": self.five, "steady": self.steady}


def asked(count: int) -> Stories:
    """The sentences that all models are tried on."""
    return drawn(count, torch.Generator().manual_seed(HELD_OUT_SEED + 1))


def told(reading: Reading, stories: Stories) -> Score:
    """Of what was read and what was asked for."""
    right = reading.right(stories)
    each = {name: round(float(column.float().mean()), 4) for name, column in zip(READ, right.unbind(1), strict=True)}
    three, five, steady = (round(float(x.float().mean()), 4) for x in (right[:, :3].all(1), right.all(1), reading.steady))
    return Score(len(stories), each, three, five, steady)


def score(imagine: Imaginer, judge: Judge, count: int, steps: int = 20, advance: Callable[[Tensor], None] = lambda clip: None) -> Score:
    """Of so many sentences, one clip each; `advance` is given every clip, [1, 3, frames, height, width]."""
    stories, clips = asked(count), list[Tensor]()
    for seed, text in enumerate(stories.captions()):
        clips.append(imagine(text, seed=seed, steps=steps).latents.float())
        advance(clips[-1])
    return told(judge.read(torch.cat(clips)), stories)


def drawn_score(judge: Judge, count: int) -> Score:
    """The same of drawn clips: the most that can be had."""
    stories = asked(count)
    return told(judge.read(film(stories, 64, torch.Generator().manual_seed(HELD_OUT_SEED + 2))), stories)
