"""Streams that show things early and nothing for long afterwards (`mmsdk.apps.memory.happenings`), asked about their beginning.

Two forms of memory hold them: keys and values (`mmsdk.stream`), and tokens of the encoder that are read anew at each question
(`mmsdk.watch`).
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from mmsdk.apps.console import counted
from mmsdk.apps.memory.happenings import Happening
from mmsdk.decoder.transformer import Decoder
from mmsdk.models.types import VLM, Tokenizer
from mmsdk.pipeline import Pipeline
from mmsdk.prompt import Layout, Prompt
from mmsdk.recall import content
from mmsdk.stream import StreamSession
from mmsdk.vision.types import Media, Video, VisionEncoder, VisualTokens

__all__ = ["Held", "Pace", "Remembering", "Seen", "answered", "paced", "watched"]

# Answers have three tokens at most, and what ends them.
_LONGEST = 6


@dataclass(frozen=True, slots=True)
class Remembering:
    """An encoder that looks at every clip once: streams here show the same windows to one memory after another, and again and again.

    Clips that differ in when they were taken alone are one: what an encoder makes of a clip depends on the times between its frames.
    """

    encoder: VisionEncoder
    known: dict[bytes, VisualTokens] = field(default_factory=dict, repr=False)

    @property
    def width(self) -> int:
        """See `VisionEncoder`."""
        return self.encoder.width

    def count(self, size: tuple[int, int], frames: int = 1) -> int:
        """See `VisionEncoder`."""
        return self.encoder.count(size, frames)

    def __call__(self, media: Sequence[Media]) -> list[VisualTokens]:
        """See `VisionEncoder`."""
        keys, begun = [content(_anew(item)) for item in media], [_begins(item) for item in media]
        fresh = [(key, _anew(item)) for key, item in zip(keys, media, strict=True) if key not in self.known]
        if fresh:
            self.known.update(zip((key for key, _ in fresh), self.encoder([item for _, item in fresh]), strict=True))
        found = [self.known[key] for key in keys]
        return [dataclasses.replace(tokens, times=tokens.times + first) for tokens, first in zip(found, begun, strict=True)]


def _begins(item: Media) -> float:
    return float(item.times[0]) if isinstance(item, Video) else 0.0


def _anew(item: Media) -> Media:
    """A clip whose times begin at 0."""
    return dataclasses.replace(item, times=item.times - item.times[0]) if isinstance(item, Video) else item


@dataclass(frozen=True, slots=True)
class Seen:
    """A model with such an encoder; see `mmsdk.models.types.VLM`."""

    vlm: VLM
    encoder: Remembering

    @property
    def name(self) -> str:
        """The model's."""
        return self.vlm.name

    @property
    def decoder(self) -> Decoder:
        """The model's."""
        return self.vlm.decoder

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self.vlm.tokenizer

    @property
    def stop_ids(self) -> frozenset[int]:
        """The model's."""
        return self.vlm.stop_ids

    @property
    def context(self) -> int:
        """The model's."""
        return self.vlm.context

    def connect(self, tokens: Sequence[VisualTokens]) -> list[Float[Tensor, "_ d"]]:
        """As the model does."""
        return self.vlm.connect(tokens)

    def layout(self, prompt: Prompt) -> Layout:
        """As the model does."""
        return self.vlm.layout(prompt)


@dataclass(frozen=True, slots=True)
class Held:
    """What came of a stream: which answers were exactly right, bytes held and bytes read for a token in the end, seconds and tokens."""

    right: tuple[bool, ...]
    held: int
    read: int
    seconds: float
    tokens: int


def answered(pipe: Pipeline, kv: str, happening: Happening, frames: int, window: int) -> Held:
    """Stream so many frames into keys and values, and ask everything of the stream as it stands then."""
    stream, started = pipe.stream_session(kv, window=window), time.perf_counter()
    for number, pixels in enumerate(happening.frames(frames)):
        stream.push(pixels, float(number))
    seconds, cache = time.perf_counter() - started, stream.cache
    return Held(_right(stream, happening), cache.nbytes, cache.read_bytes, seconds, stream.kept)


def watched(pipe: Pipeline, by: str, hold: int, happening: Happening, frames: int, window: int) -> Held:
    """Stream them into tokens of the encoder: all that is held goes through the decoder at each question."""
    watch, started = pipe.watch(by, hold=hold, window=window), time.perf_counter()
    for number, pixels in enumerate(happening.frames(frames)):
        watch.push(pixels, float(number))
    seconds, seen = time.perf_counter() - started, watch.encoded()
    said = (pipe(seen, qa.question, max_tokens=_LONGEST, compress="identity") for qa in happening.asked)
    right = tuple(answer.strip() == qa.answer for answer, qa in zip(said, happening.asked, strict=True))
    size = seen.tokens.features.nbytes
    return Held(right, size, size, seconds, seen.full)


def _right(stream: StreamSession, happening: Happening) -> tuple[bool, ...]:
    """Each is asked of a fork: none disturbs the stream, or hears of another."""
    return tuple(stream.ask(qa.question, max_tokens=_LONGEST).strip() == qa.answer for qa in happening.asked)


@dataclass(frozen=True, slots=True)
class Pace:
    """A stream at one time: frames so far, which answers are right, bytes held and read, tokens a second since the last time."""

    frames: int
    right: tuple[bool, ...]
    held: int
    read: int
    tok_s: float


def paced(pipe: Pipeline, kv: str, happening: Happening, frames: int, times: int, window: int) -> list[Pace]:
    """Push so many frames, and `times` times on the way look at the stream and ask it; asking takes none of the time that is told."""
    stream, found, done, tokens = pipe.stream_session(kv, window=window), list[Pace](), 0, 0
    for number in counted(f"a stream that goes on: {kv}", range(1, times + 1)):
        goal, started = frames * number // times, time.perf_counter()
        for place, pixels in enumerate(happening.frames(goal - done, done)):
            stream.push(pixels, float(done + place))
        seconds, read = time.perf_counter() - started, stream.kept - tokens
        held = stream.cache.nbytes, stream.cache.read_bytes
        found.append(Pace(goal, _right(stream, happening), *held, read / seconds))
        done, tokens = goal, stream.kept
    return found
