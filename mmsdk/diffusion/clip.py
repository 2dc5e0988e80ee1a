"""A clip that was made: a `Video` in every way, which also knows what it was made of, what it cost, and how it is written to a file."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from mmsdk.diffusion.generate import Cost
from mmsdk.vision.films import save_film
from mmsdk.vision.types import Video
from mmsdk.vision.values import brief

__all__ = ["Clip", "Timings"]


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds of each stage: text to what the model reads, steps from noise to latents, latents to pixels."""

    text: float = 0.0
    denoise: float = 0.0
    decode: float = 0.0

    @property
    def total(self) -> float:
        """All stages together."""
        return self.text + self.denoise + self.decode


@dataclass(frozen=True, slots=True)
class Clip(Video):
    """Frames with their times, the latents that they were decoded from, and the passes of the model that it took.

    `source` is the text. It goes in wherever a clip does: `pipe(clip, "What happens?")` of a model that sees.
    """

    latents: Float[Tensor, "1 c f rows columns"] = field(kw_only=True)
    cost: Cost = field(kw_only=True)
    timings: Timings = field(default=Timings(), kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __repr__(self) -> str:
        return brief(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a film (.mp4), an animation (.gif) or a sheet of all frames (.png), as a whole or not at all; the path.

        Raises InputError for another ending, and where it cannot be written.
        """
        target = Path(path)
        save_film(self, target)
        return target
