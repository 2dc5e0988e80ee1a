"""Reads clips: a small network that tells colour, shape, direction, relation and box of what moves, taught on drawn clips alone.

It has seen neither the model's clips nor the seeds that it is tried on. Frames are read one by one, and what a clip shows is the mean of
what its frames show, so that the frames of a clip can be held against one another.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from mmsdk.apps.kept import write
from mmsdk.apps.train_video.world import BOXES, COLOURS, DIRECTIONS, RELATIONS, SHAPES, SIDE, Stories, drawn, film

__all__ = ["HELD_OUT_SEED", "Judge", "Reading", "open_judge", "teach"]

HELD_OUT_SEED = 3_000_017
_SEED = 3_000_001
_HEADS = (len(COLOURS), len(SHAPES), len(DIRECTIONS), len(RELATIONS), len(BOXES))


@dataclass(frozen=True, slots=True)
class Reading:
    """What clips show, as `Stories.table` tells it, and for each frame whether its colour and shape are the clip's."""

    table: Int[Tensor, "b 5"]
    steady: Bool[Tensor, "b t"]

    def right(self, stories: Stories) -> Bool[Tensor, "b 5"]:
        """Where it is what was told."""
        return self.table == stories.table()


class Judge(nn.Module):
    """Convolutions within frames, then over their features from frame to frame; looks are looked for everywhere alike."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        sizes = (3, 16, 32, 48, 48)
        layers: list[nn.Module] = []
        for number, (one, other) in enumerate(pairwise(sizes)):
            layers += [nn.Conv2d(one, other, 3 if number else 5, stride=2, padding=1 if number else 2), nn.GELU()]
        self.near, self.far = nn.Sequential(*layers[:-2]), nn.Sequential(*layers[-2:])
        self.frames = nn.Sequential(nn.Flatten(), nn.Linear(sizes[-1] * (SIDE // 16) ** 2, width))
        self.details = nn.Conv2d(sizes[-2], width, 3, padding=1)
        self.motion = nn.Conv1d(width, width, 3, padding=1)
        self.looks = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, sum(_HEADS[:2])))
        self.events = nn.Linear(width, sum(_HEADS[2:]))

    def forward(self, clips: Float[Tensor, "b 3 t h w"]) -> tuple[Float[Tensor, "b t looks"], Float[Tensor, "b t events"]]:
        """Scores of colour and shape, and of direction, relation and box, by frame."""
        near = self.near(clips.transpose(1, 2).flatten(0, 1))
        frames, details = (x.unflatten(0, (len(clips), -1)) for x in (self.frames(self.far(near)), self.details(near).amax((2, 3))))
        moving = F.gelu(self.motion(F.gelu(frames).transpose(1, 2)).transpose(1, 2))
        return self.looks(F.gelu(torch.cat((frames, details), -1))), self.events(moving)

    @torch.no_grad()
    def read(self, clips: Float[Tensor, "b 3 t h w"]) -> Reading:
        """What is in the clips, from -1 to 1, 64 pixels a side."""
        looks, events = self(clips.float())
        told = [scores.mean(1).argmax(-1) for scores in _split(looks, events)]
        frames = torch.stack([scores.argmax(-1) for scores in _split(looks, events)[:2]], -1)
        return Reading(torch.stack(told, 1), (frames == torch.stack(told[:2], 1)[:, None]).all(-1))


def teach(path: Path, steps: int = 2000, rows: int = 16, rate: float = 1.5e-3) -> float:
    """Teach a judge, write it, and give the share of held-out drawn clips of which it reads everything right."""
    torch.manual_seed(_SEED)
    judge = Judge()
    optimiser = torch.optim.AdamW(judge.parameters(), lr=rate)
    for step in tqdm(range(steps), desc="judge", unit="step", mininterval=10):
        generator = torch.Generator().manual_seed(_SEED + step)
        stories = drawn(rows, generator)
        clips = _worn(film(stories, SIDE, generator), generator)
        scores = [frames.mean(1) for frames in _split(*judge(clips))]
        loss = sum((F.cross_entropy(one, told) for one, told in zip(scores, stories.table().unbind(1), strict=True)), torch.zeros(()))
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50, 1.05 - step / steps)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    write(path, judge.state_dict())
    generator = torch.Generator().manual_seed(HELD_OUT_SEED)
    stories = drawn(8 * rows, generator)
    right = [judge.read(film(part, SIDE, generator)).right(part) for part in _parts(stories, rows)]
    return float(torch.cat(right).all(1).float().mean())


def open_judge(path: Path) -> Judge:
    """The judge of a file."""
    judge = Judge()
    judge.load_state_dict(load_file(path))
    return judge.eval().requires_grad_(False)


def _split(looks: Tensor, events: Tensor) -> list[Tensor]:
    """Scores by what they are of."""
    return [*looks.split(_HEADS[:2], -1), *events.split(_HEADS[2:], -1)]


def _parts(stories: Stories, rows: int) -> list[Stories]:
    return [Stories(*part.unbind(1)) for part in stories.table().split(rows)]


def _worn(clips: Tensor, generator: torch.Generator) -> Tensor:
    """Noise and blur, each clip with its own: what is made is never as clean as what is drawn."""
    strength = 0.25 * torch.rand(len(clips), 1, 1, 1, 1, generator=generator)
    blurred = F.interpolate(F.avg_pool3d(clips, (1, 2, 2)), scale_factor=(1, 2, 2))
    mixed = torch.lerp(clips, blurred, torch.rand(len(clips), 1, 1, 1, 1, generator=generator))
    return mixed + strength * torch.randn(clips.shape, generator=generator)
