"""What the tab of clips computes, without the page: frames one after another, what is held of each, and answers at any time."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field

import PIL.Image
import torch

from mmsdk.answer import Answer
from mmsdk.apps.web.looking import Upload, named
from mmsdk.apps.web.models import Models
from mmsdk.errors import InputError
from mmsdk.vision.intake import Limits, Sampling, load_video
from mmsdk.vision.types import Video
from mmsdk.watch import Watch

__all__ = ["WINDOW", "Step", "Watcher", "clip", "unseen"]

WINDOW = 2  # frames that go through the encoder together: the fewest, so that the page moves on often
SMALL = 144  # pixels of a frame's longer side on the page


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the clip's grid: the frame that stands for it, its second, and how many of its tokens are held."""

    frame: PIL.Image.Image
    seconds: float
    held: int
    of: int


@dataclass(slots=True)
class Watcher:
    """One visitor's clip as far as it was watched. Questions may come while frames do: the models' `turn` is held for one of the two.

    `stops` counts how often another event ended what was being done; what began at one count ends when it has changed, and what was seen
    is held.
    """

    watch: Watch | None = None
    stops: int = 0
    weights: str = "none"
    frames: list[PIL.Image.Image] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def see(self, models: Models, video: Video, by: str, hold: int, weights: str, began: int) -> Iterator[list[Step]]:
        """Watch a clip from its first frame; after every window what is held. Raises as `Pipeline.watch` and `Watch.push` do.

        `began` is what `stops` was when this was asked for, here and below.
        """
        self.watch, self.weights = models.pipe(weights).watch(by, hold=hold, window=WINDOW), weights
        self.frames, self.seconds = [], []
        for number, (frame, seconds) in enumerate(zip(video.frames, video.times.tolist(), strict=True), 1):
            if self.stops != began:
                return
            with models.turn:
                self.watch.push(frame, seconds)
            self.frames.append(_small(frame))
            self.seconds.append(seconds)
            if number % WINDOW == 0 or number == len(video.frames):
                yield self.steps(models)

    def steps(self, models: Models) -> list[Step]:
        """What is held of the clip so far."""
        assert self.watch is not None, "a clip is watched first"
        with models.turn:
            tokens = self.watch.encoded().tokens
        steps, rows, columns = tokens.grid
        held = torch.bincount(tokens.positions[:, 0], minlength=steps).tolist()
        # a model may join several frames to one step
        frames = [step * len(self.frames) // steps for step in range(steps)]
        return [Step(self.frames[at], self.seconds[at], held[step], rows * columns) for step, at in enumerate(frames)]

    def ask(self, models: Models, question: str, tokens: int, began: int) -> Iterator[tuple[str, Answer | None]]:
        """The answer about what was seen so far, piece by piece; at its end whole, unless it is stopped.

        Raises InputError before the first frame.
        """
        if self.watch is None or not self.frames:
            raise InputError("nothing was seen yet; press Watch first", item="clip")
        pipe = models.pipe(self.weights)
        with models.turn:
            seen = self.watch.encoded()
        with models.turn:
            pieces = pipe.stream(seen, question, max_tokens=tokens)
        text = ""
        with closing(pieces):
            while self.stops == began:
                with models.turn:
                    piece = next(pieces, None)
                if piece is None:
                    yield text, pieces.answer
                    return
                text += piece
                yield text, None


def clip(upload: Upload, frames: int, limits: Limits) -> Video:
    """So many frames of a clip, spread over it. Raises InputError, naming the clip as the visitor does."""
    try:
        return load_video(upload.path, sampling=Sampling(frames=frames), limits=limits)
    except InputError as error:
        raise named(error, upload.name) from error


def unseen(video: Video) -> list[Step]:
    """The frames of a clip that nobody has watched yet: nothing is held of any."""
    return [Step(_small(frame), seconds, 0, 0) for frame, seconds in zip(video.frames, video.times.tolist(), strict=True)]


def _small(frame: torch.Tensor) -> PIL.Image.Image:
    small = PIL.Image.fromarray(frame.permute(1, 2, 0).contiguous().numpy())
    small.thumbnail((SMALL, SMALL))
    return small
