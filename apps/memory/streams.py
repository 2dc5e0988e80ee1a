"""Streams that begin with something that happens and go on with a still picture for long; in the end they are asked about the beginning.

Two forms of memory hold them: keys and values (`mmsdk.stream`), and tokens of the encoder that are read anew at each question
(`mmsdk.watch`).
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mmsdk.apps.console import counted
from mmsdk.apps.train_mini.clips import clip
from mmsdk.apps.train_mini.questions_clip import about_clip
from mmsdk.apps.train_mini.scenes import Artist
from mmsdk.decoder.transformer import Decoder
from mmsdk.models.types import VLM, Tokenizer
from mmsdk.pipeline import Pipeline
from mmsdk.prompt import Layout, Prompt
from mmsdk.recall import content
from mmsdk.vision.types import Media, Video, VisionEncoder, VisualTokens

__all__ = ["Happening", "Held", "Pace", "Remembering", "Seen", "answered", "happenings", "paced", "watched"]

# Nobody looked at what this draws while mini's recipe was made.
_SEED = 2_000_033
_LONGEST = 12


@dataclass(frozen=True, slots=True)
class Happening:
    """Frames of what happens, frames that follow over and over, and what is asked."""

    early: UInt8[Tensor, "t 3 h w"]
    later: UInt8[Tensor, "u 3 h w"]
    question: str
    answer: str

    def frames(self, count: int) -> Iterator[UInt8[Tensor, "3 h w"]]:
        """The first `count` frames."""
        for number in range(count):
            ahead = number - len(self.early)
            yield self.early[number] if ahead < 0 else self.later[ahead % len(self.later)]


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


def happenings(artist: Artist, count: int) -> list[Happening]:
    """Scenes as mini is trained on, drawn from a seed that training never uses; then a background without anything, which flickers."""
    found, number = list[Happening](), 0
    while len(found) < count:
        rng = np.random.default_rng((_SEED, number))
        drawn, number = clip(artist, rng), number + 1
        asked = [qa for qa in about_clip(drawn, rng) if qa.type in ("order", "direction", "object")]
        if not asked:
            continue
        qa = asked[int(rng.integers(len(asked)))]
        still = np.asarray(artist.background(rng, drawn.frames.shape[1:3])[0]).astype(np.int64)
        later = np.stack([np.clip(still + rng.integers(-3, 4), 0, 255) for _ in range(8)]).astype(np.uint8)
        early, after = (torch.from_numpy(frames).permute(0, 3, 1, 2) for frames in (drawn.frames, later))
        found.append(Happening(early, after, qa.question, qa.answer))
    return found


@dataclass(frozen=True, slots=True)
class Held:
    """What came of a stream: whether the answer was exactly right, bytes held and bytes read for a token in the end, seconds and tokens."""

    right: bool
    held: int
    read: int
    seconds: float
    tokens: int


def answered(pipe: Pipeline, kv: str, happening: Happening, frames: int) -> Held:
    """Stream so many frames into keys and values, and ask once."""
    stream, started = pipe.stream_session(kv), time.perf_counter()
    for number, pixels in enumerate(happening.frames(frames)):
        stream.push(pixels, float(number))
    seconds, cache = time.perf_counter() - started, stream.cache
    answer = stream.ask(happening.question, max_tokens=_LONGEST)
    return Held(answer.strip() == happening.answer, cache.nbytes, cache.read_bytes, seconds, answer.tokens.kept)


def watched(pipe: Pipeline, by: str, hold: int, happening: Happening, frames: int) -> Held:
    """Stream them into tokens of the encoder, and ask once: all that is held goes through the decoder then."""
    watch, started = pipe.watch(by, hold=hold), time.perf_counter()
    for number, pixels in enumerate(happening.frames(frames)):
        watch.push(pixels, float(number))
    seconds, seen = time.perf_counter() - started, watch.encoded()
    answer = pipe(seen, happening.question, max_tokens=_LONGEST, compress="identity")
    size = seen.tokens.features.nbytes
    return Held(answer.strip() == happening.answer, size, size, seconds, seen.full)


@dataclass(frozen=True, slots=True)
class Pace:
    """A stream at one time: frames so far, bytes held, milliseconds for each frame and tokens a second since the last time."""

    frames: int
    held: int
    read: int
    frame_ms: float
    tok_s: float


def paced(pipe: Pipeline, kv: str, happening: Happening, frames: int, times: int) -> list[Pace]:
    """Push so many frames, and look at the stream `times` times on the way."""
    stream, found, done, tokens = pipe.stream_session(kv), list[Pace](), 0, 0
    for number in counted("a stream that goes on", range(1, times + 1)):
        goal, started = frames * number // times, time.perf_counter()
        for place, pixels in enumerate(happening.frames(goal - done)):
            stream.push(pixels, float(done + place))
        seconds, read = time.perf_counter() - started, stream.kept - tokens
        found.append(Pace(goal, stream.cache.nbytes, stream.cache.read_bytes, 1000 * seconds / (goal - done), read / seconds))
        done, tokens = goal, stream.kept
    return found
