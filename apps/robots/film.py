"""A film of one episode: what the arm's two cameras show, side by side."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from mmsdk.vision.types import Video
from mmsdk.vla.envs.metaworld import CAMERAS, RATE, MetaWorld

__all__ = ["Film"]

_EVERY = 2


@dataclass(frozen=True, slots=True)
class Film:
    """Looks at the episode of this seed, and at no other. It is shown every other tick."""

    seed: int
    frames: list[Tensor] = field(default_factory=list, repr=False)
    _ticks: Iterator[int] = field(default_factory=count, repr=False)

    def __call__(self, watched: MetaWorld) -> None:
        """See `mmsdk.apps.robots.episodes.played`: called at every tick."""
        if watched.current == self.seed and next(self._ticks) % _EVERY == 0:
            images = watched.observe().images
            self.frames.append(torch.cat([images[name].pixels for name in CAMERAS], dim=2))

    @property
    def clip(self) -> Video:
        """What was seen so far, in the loop's time."""
        shown = torch.stack(self.frames)
        return Video(shown, torch.arange(len(shown)) * (_EVERY / RATE))
