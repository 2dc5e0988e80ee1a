"""CLIP as a vision encoder, in the way of LLaVA (arXiv 2304.08485): patch states before the last layer, scored by the class token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import ModelError
from mmsdk.vision.encode import Fit, Sight, encode, pooled_grid
from mmsdk.vision.taps import Taps
from mmsdk.vision.types import Media, VisualTokens
from mmsdk.vision.vit import ViT

__all__ = ["ClipEncoder"]


@dataclass(frozen=True, slots=True)
class ClipEncoder:
    """A `VisionEncoder`. Features are the patch states after `layer` (-2: after the last but one), without a norm or the class token.

    Saliency is the class token's attention in that layer, mean over heads, which is what VisionZip and FasterVLM score by; keys are that
    layer's, heads side by side. The frames of a clip are pooled by `frame_pool` x `frame_pool`; at most `batch` frames are seen at once.
    """

    vit: ViT
    preprocess: Fit
    frame_pool: int = 2
    layer: int = -2
    batch: int = 8

    def __post_init__(self) -> None:
        if not self.vit.config.class_token:
            raise ModelError("ClipEncoder scores by the class token, and this vision transformer has none; use SiglipEncoder")

    @property
    def width(self) -> int:
        """d, the width of the features."""
        return self.vit.config.width

    def count(self, size: tuple[int, int], frames: int = 1) -> int:
        """How many tokens an input of (height, width) pixels gives; a clip of one frame counts as a picture."""
        t, h, w = pooled_grid(self.preprocess.grid(size), frames, self.frame_pool)
        return t * h * w

    @torch.no_grad()
    def __call__(self, media: Sequence[Media]) -> list[VisualTokens]:
        """The tokens of each input, in order. Raises InputError, with its place, for an input without pixels."""
        return encode(media, self.preprocess, self._see, frame_pool=self.frame_pool, batch=self.batch, like=self.vit.position)

    def _see(self, pixels: Float[Tensor, "b 3 h w"]) -> Sight:
        at = (self.layer,)
        read = self.vit(pixels, Taps(hidden=at, keys=at, first_rows=at)).taps
        keys = read.keys[self.layer][:, :, 1:].transpose(1, 2).flatten(2)
        return Sight(read.hidden[self.layer][:, 1:], read.first_rows[self.layer][:, :, 1:].mean(dim=1), keys)
