"""What sight is made of: an image, a clip, and the visual tokens that an encoder turns them into.

Letters: t frames, h height, w width, n visual tokens, d width of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int, UInt8
from torch import Tensor

from mmsdk.vision.values import brief

__all__ = ["Image", "Media", "Video", "VisionEncoder", "VisualTokens"]


@dataclass(frozen=True, slots=True)
class Image:
    """One upright RGB picture. `source` names it in messages; `notes` says what intake decided (first frame of 3, ...)."""

    pixels: UInt8[Tensor, "3 h w"]
    source: str = "image"
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return brief(self)

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.pixels.shape[1], self.pixels.shape[2]


@dataclass(frozen=True, slots=True)
class Video:
    """A sampled clip: RGB frames and the true time of each in seconds from the start of the clip."""

    frames: UInt8[Tensor, "t 3 h w"]
    times: Float[Tensor, " t"]
    source: str = "video"
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return brief(self)

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.frames.shape[2], self.frames.shape[3]


Media = Image | Video


@dataclass(frozen=True, slots=True)
class VisualTokens:
    """The tokens of one image or one clip, in reading order (time, then rows, then columns).

    `positions` are (t, y, x) in units of grid cells, counted from 0, and survive compression: a kept token keeps its own, a
    merged one the rounded weighted mean of its members. `weight` is the number of patches a token stands for. `grid` is the full
    (t, h, w) before compression. `times` are the seconds of each grid step t. `saliency` is the encoder's own importance per
    token (for example attention of the class token), empty (length 0) where the encoder offers none. `deep` are further features of the
    same tokens, as wide as the language model, that are added to its stream after its first, second, ... layer (DeepStack); mostly none.
    """

    features: Float[Tensor, "n d"]
    positions: Int[Tensor, "n 3"]
    weight: Float[Tensor, " n"]
    grid: tuple[int, int, int]
    times: Float[Tensor, " t"]
    saliency: Float[Tensor, " m"]
    keys: Float[Tensor, "k e"] | None = field(default=None, repr=False)
    deep: tuple[Float[Tensor, "n w"], ...] = field(default=(), repr=False)

    def __repr__(self) -> str:
        return brief(self)

    def __len__(self) -> int:
        return self.features.shape[0]


@runtime_checkable
class VisionEncoder(Protocol):
    """Pixels to tokens: batched inside (equal sizes run together), one `VisualTokens` per input, in input order."""

    @property
    def width(self) -> int:
        """d, the width of the features."""
        ...

    def count(self, size: tuple[int, int], frames: int = 1) -> int:
        """How many tokens an input of this pixel size gives, without encoding it."""
        ...

    def __call__(self, media: Sequence[Media]) -> list[VisualTokens]: ...
