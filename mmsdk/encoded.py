"""A picture or a clip that was encoded before: all of its tokens, kept aside, so that the next question chooses from them anew.

    photo = pipe.encode("photo.jpg")
    pipe(photo, "What is on the table?", compress="deft:0.1")
    pipe(photo, "Which colour is the cup?", compress="deft:0.1")   # other tokens, and no encoder

It stands wherever a picture may stand: alone, among others, in a batch, in a stream. What compression drops for one question is dropped
from that question's prompt alone.
"""

import dataclasses
from dataclasses import dataclass

import torch

from mmsdk.vision.intake import Source
from mmsdk.vision.types import Image, Media, VisualTokens
from mmsdk.vision.values import brief
from mmsdk.vision.writing import Writing, writing

__all__ = ["Encoded", "Given", "frames_of", "moved"]

NOWHERE = Writing(0, 0.0)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The cold copy of one visual input, in the memory of the processor. `model` made it, and no other can read it.

    `source` and `notes` are those of the picture or clip; `full` is how many tokens it had, which a stream may hold fewer of; `writing` is
    what was found of it in a picture. `size` is its (height, width) in pixels, `frames` how many a clip had, 0 for a picture.
    """

    tokens: VisualTokens
    source: str
    full: int
    model: str
    notes: tuple[str, ...] = ()
    writing: Writing = NOWHERE
    size: tuple[int, int] = (0, 0)
    frames: int = 0

    def __repr__(self) -> str:
        return brief(self)

    @staticmethod
    def of(media: Media, tokens: VisualTokens, model: str) -> "Encoded":
        """What an encoder made of a picture or a clip."""
        found = writing(media.pixels) if isinstance(media, Image) else NOWHERE
        kept = moved(tokens, torch.device("cpu"))
        return Encoded(kept, media.source, len(tokens), model, media.notes, found, media.size, frames_of(media))

    def __len__(self) -> int:
        return len(self.tokens)


Given = Source | Encoded
"""What a question may be about: whatever intake reads, or what was encoded before."""


def frames_of(item: Media | Encoded) -> int:
    """How many frames a clip has, encoded or not; 0 for a picture, which a clip of one frame is."""
    if isinstance(item, Encoded):
        return item.frames
    return 0 if isinstance(item, Image) or len(item.frames) == 1 else len(item.frames)


def moved(tokens: VisualTokens, device: torch.device) -> VisualTokens:
    """The same tokens on a device; views of each other where they are there already."""
    return dataclasses.replace(
        tokens,
        features=tokens.features.to(device),
        positions=tokens.positions.to(device),
        weight=tokens.weight.to(device),
        times=tokens.times.to(device),
        saliency=tokens.saliency.to(device),
        keys=None if tokens.keys is None else tokens.keys.to(device),
        deep=tuple(part.to(device) for part in tokens.deep),
    )
