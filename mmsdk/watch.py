"""A clip that is still going on: frames come one after another, memory stays bounded, and it can be asked about at any time.

    watch = pipe.watch("simplecluster", hold=1024)
    for seconds, frame in camera:
        watch.push(frame, seconds)
    pipe(watch.encoded(), "What happened so far?")

Held are encoder tokens, at most `hold` of them and those of one window of frames, and of each frame that came the time it was taken (four
bytes). What holds for which method is told in `mmsdk.tokencomp.stream`.
"""

import dataclasses
import math
from dataclasses import dataclass

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from mmsdk import plugins
from mmsdk.compress import METHODS
from mmsdk.encoded import Encoded, moved
from mmsdk.errors import InputError, PluginError
from mmsdk.exclusive import Exclusive
from mmsdk.models.types import VLM
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.plan import keep
from mmsdk.tokencomp.stream import Held, form
from mmsdk.tokencomp.types import Compressor
from mmsdk.vision.intake import Source, load_image
from mmsdk.vision.types import Image, Video, VisualTokens
from mmsdk.vision.values import real, shown, whole

__all__ = ["Arrived", "Watch", "holding", "windowed"]

LATEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Arrived:
    """Frames that wait for their window to be full, with their times, and what is known of all that came: a value, `push` gives the next.

    `size` is that of every frame, `first` and `last` are times by the user's clock, `count` is how many came.
    """

    frames: tuple[UInt8[Tensor, "3 h w"], ...] = ()
    times: tuple[float, ...] = ()
    size: tuple[int, int] = (0, 0)
    first: float = 0.0
    last: float = -math.inf
    count: int = 0
    notes: tuple[str, ...] = ()

    def push(self, frame: Source, seconds: float) -> "Arrived":
        """With one more. Raises InputError, naming the frame by its number, for one that does not follow those before it."""
        image, taken = self._checked(frame, seconds), real(seconds)
        first = taken if self.count == 0 else self.first
        notes = tuple(dict.fromkeys((*self.notes, *image.notes)))
        return Arrived((*self.frames, image.pixels), (*self.times, taken - first), image.size, first, taken, self.count + 1, notes)

    def emptied(self) -> "Arrived":
        """When those that waited have been looked at."""
        return dataclasses.replace(self, frames=(), times=())

    def seen(self, vlm: VLM, joining: bool) -> VisualTokens:
        """What the encoder makes of those that wait, as a part of a clip; `joining` says that the clip has other parts."""
        pixels, times = torch.stack(self.frames), torch.tensor(self.times, dtype=torch.float32)
        if len(pixels) == 1 and joining:
            return _one_more(vlm, pixels, times)
        (tokens,) = vlm.encoder([Video(pixels, times, "stream")])
        return tokens

    def _checked(self, frame: Source, seconds: float) -> Image:
        name = f"frame {self.count}"
        try:
            image = load_image(frame)
        except InputError as error:
            raise error.within(self.count, frame) from error
        if self.count and image.size != self.size:
            raise InputError(f"is {image.size}, the first is {self.size} (height, width); expected one size", item=name)
        # a clip keeps its times in 32 bits, counted from its first frame
        if not (self.last < real(seconds) < math.inf and abs(real(seconds) - self.first) <= LATEST):
            raise InputError(f"is of {shown(seconds)} s, after one of {self.last} s; expected finite, rising times", item=name)
        return image


class Watch:
    """Frames in, at any time an `Encoded` out, which is what `pipe.encode` gives for a clip.

    `window` frames go through the encoder together; of them the pixels are held. A method that wants to know the question cannot work
    before one is asked: PluginError. For several threads: frames wait for one another, and `encoded` is the clip as it is when it is asked
    for.
    """

    def __init__(self, vlm: VLM, by: Compressor, hold: int, window: int = 8) -> None:
        if by.asks:
            raise PluginError(
                f"{type(by).__name__.lower()} wants to know the question, which comes after the frames; choose another method"
            )
        self._vlm = vlm
        self._window = windowed(window)
        # one value, so that who looks at both sees those of one time
        self._now: tuple[Held, Arrived] = form(by, Planned(vlm, by), hold), Arrived()
        self._alone = Exclusive("stream")

    def push(self, frame: Source, seconds: float) -> None:
        """One more frame, in any form that intake reads, and when it was taken, by any clock; the clip begins with its first frame.

        Raises InputError, naming the frame by its number, for one that is no picture, has another size than the first or is not later than
        the one before; it is then as if it had not come.
        """
        with self._alone:
            held, arrived = self._now[0], self._now[1].push(frame, seconds)
            full = len(arrived.frames) == self._window
            self._now = (self._with(held, arrived), arrived.emptied()) if full else (held, arrived)

    def encoded(self) -> Encoded:
        """The clip so far, to be asked about; more frames may come afterwards. Raises InputError where none came yet."""
        before, came = self._now
        held = self._with(before, came).tokens
        if not held:
            raise InputError("no frame has come yet; push one first", item="stream")
        tokens = moved(held[0], torch.device("cpu"))
        full = math.prod(tokens.grid)
        notes = (f"of the {full} tokens of {came.count} frames {len(tokens)} are held",) if len(tokens) < full else ()
        return Encoded(tokens, "stream", full, self._vlm.name, came.notes + notes, size=came.size, frames=came.count)

    def _with(self, held: Held, arrived: Arrived) -> Held:
        """What is held with the frames that wait for their window to be full."""
        return held.push(arrived.seen(self._vlm, joining=bool(held.tokens))) if arrived.frames else held


def windowed(window: int) -> int:
    """How many frames go through an encoder together. Raises InputError for so few that they are no clip."""
    if not whole(window, 2):
        raise InputError(f"a window of {shown(window)} frames is no clip; give 2 or more", item="window")
    return window


def holding(by: str) -> Compressor:
    """A method by its name and knobs, without an amount. Raises PluginError for one that cannot hold frames until a question comes."""
    if not isinstance(by, str):
        raise PluginError(f'{shown(by)} names no method; write pipe.watch("simplecluster")')
    asked = plugins.parse(by)
    if asked.amount:
        raise PluginError(f"{by!r}: how much is held is said by hold={asked.amount}, how much a question keeps by its own compress")
    method = plugins.build(METHODS, asked)
    if not isinstance(method, Compressor):
        raise PluginError(f"{asked.name} does not work between encoder and decoder, so that no frames can wait for a question by it")
    return method


@dataclass(frozen=True, slots=True)
class Planned:
    """What a method makes of an input, on the side of the projector that it works on; see `mmsdk.tokencomp.stream.Planner`."""

    vlm: VLM
    by: Compressor

    @torch.no_grad()
    def __call__(self, tokens: VisualTokens, count: int) -> Int[Tensor, " n"]:
        """The group of every token. The method is shown the frames that tokens are held of, however many came between them."""
        given = dataclasses.replace(tokens, features=self.vlm.connect([tokens])[0]) if self.by.side == "behind" else tokens
        (found,) = self.by([_without_gaps(given)], [Budget(count)])
        return found.audit.assignment


def _without_gaps(tokens: VisualTokens) -> VisualTokens:
    """A clip of the frames that there are tokens of, so that no plan is as large as the clip has become."""
    frames, numbers = tokens.positions[:, 0].unique(return_inverse=True)
    positions = torch.cat([numbers[:, None], tokens.positions[:, 1:]], dim=1)
    return dataclasses.replace(tokens, positions=positions, grid=(len(frames), *tokens.grid[1:]), times=tokens.times[frames])


def _one_more(vlm: VLM, pixels: UInt8[Tensor, "1 3 h w"], times: Tensor) -> VisualTokens:
    """The step of a frame that follows others. A clip of one frame would be a picture, which is not pooled; of two alike, one is taken."""
    (twice,) = vlm.encoder([Video(pixels.expand(2, -1, -1, -1), times.expand(2), "stream")])
    steps, rows, columns = twice.grid
    one = dataclasses.replace(twice, grid=(1, rows, columns), times=twice.times[:1], weight=twice.weight * steps / 2)
    return keep(one, torch.arange(rows * columns, device=one.features.device), method="stream").tokens
