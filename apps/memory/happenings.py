"""Streams that show a few things early, one after another, and then nothing for as long as they last; each thing is asked about in the end.

Things are shapes on a plain ground, which is all that mini has learnt to see well: where it does not know an answer with everything held,
nothing is learnt of a memory. The ground stays the same, so that a stream has no other event. Colours and places are drawn evenly, none
twice in a stream: whoever says the same of every shape is right about one colour in ten and one place in nine at most, and so is whoever
guesses.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from mmsdk.apps.train_mini import vocabulary as words
from mmsdk.apps.train_mini.scenes import Artist
from mmsdk.apps.train_mini.wording import QA
from mmsdk.errors import InputError

__all__ = ["Happening", "happenings"]

# Nobody looked at what this draws while mini's recipe was made, nor while questions and policies were chosen for what it is to show.
_SEED = 2_000_033
_SIDE, _FLICKER = 224, 4


@dataclass(frozen=True, slots=True)
class Happening:
    """Frames in which things are shown, frames without any that follow over and over, and what is asked: questions of one answer each."""

    early: UInt8[Tensor, "t 3 h w"]
    later: UInt8[Tensor, "u 3 h w"]
    asked: tuple[QA, ...]

    def frames(self, count: int, start: int = 0) -> Iterator[UInt8[Tensor, "3 h w"]]:
        """`count` frames from the one numbered `start` on."""
        for number in range(start, start + count):
            ahead = number - len(self.early)
            yield self.early[number] if ahead < 0 else self.later[ahead % len(self.later)]


def happenings(artist: Artist, count: int, events: int, window: int, kind: int = 0) -> list[Happening]:
    """`count` streams that show `events` shapes, each for `window` frames; another `kind` draws others.

    Raises InputError for more events than there are shapes.
    """
    if not 1 <= events <= len(words.SHAPES):
        raise InputError(f"a stream shows 1 to {len(words.SHAPES)} shapes, not {events}", item="events")
    return [_happening(artist, np.random.default_rng((_SEED, kind, number)), events, window) for number in range(count)]


def _happening(artist: Artist, rng: np.random.Generator, events: int, window: int) -> Happening:
    ground, name = artist.background(rng, (_SIDE, _SIDE))
    while not name:
        # of photographs and gradients nobody can say what colour a thing has beside them
        ground, name = artist.background(rng, (_SIDE, _SIDE))
    shapes = rng.permutation(words.SHAPES)[:events]
    colours = rng.permutation([colour for colour in words.COLOURS if colour != name])[:events]
    shown, asked = list[np.ndarray](), list[QA]()
    for shape, colour, cell in zip(map(str, shapes), map(str, colours), rng.permutation(9)[:events], strict=True):
        x, y = ((place + 0.5) / 3 + rng.uniform(-0.05, 0.05) for place in (cell % 3, cell // 3))
        sprite = artist.sprite(shape, colour, "shape", int(rng.integers(60, 80)), rng)
        picture = ground.copy()
        picture.paste(sprite, (int(x * _SIDE - sprite.width / 2), int(y * _SIDE - sprite.height / 2)), sprite)
        shown.append(_flickering(rng, picture, window))
        asked.append(QA("colour", f"What colour is the {shape}?", colour))
        asked.append(QA("place", f"Where is the {shape}?", words.place_of(x, y)))
    early, later = (torch.from_numpy(frames).permute(0, 3, 1, 2) for frames in (np.concatenate(shown), _flickering(rng, ground, window)))
    return Happening(early, later, tuple(asked))


def _flickering(rng: np.random.Generator, picture: Image.Image, count: int) -> np.ndarray:
    """A picture over and over, as a camera sees it: no two frames are as bright."""
    still = np.asarray(picture).astype(np.int64)
    return np.stack([np.clip(still + rng.integers(-_FLICKER, _FLICKER + 1), 0, 255) for _ in range(count)]).astype(np.uint8)
