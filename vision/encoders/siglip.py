"""SigLIP as a vision encoder: all patch tokens after the final norm. It has no class token, so patches are scored by one another."""

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

__all__ = ["SiglipEncoder"]


@dataclass(frozen=True, slots=True)
class SiglipEncoder:
    """A `VisionEncoder`. Features are the patch tokens after the final norm.

    Saliency is the attention a patch receives in the last layer, mean over all querying patches and heads, the usual stand-in where there
    is no class token; keys are that layer's, heads side by side. The frames of a clip are pooled by `frame_pool` x `frame_pool`; at most
    `batch` frames are seen at once.
    """

    vit: ViT
    preprocess: Fit
    frame_pool: int = 2
    batch: int = 8

    def __post_init__(self) -> None:
        if self.vit.config.class_token:
            raise ModelError("SiglipEncoder takes every token for a patch, and this vision transformer has a class token")

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
        out = self.vit(pixels, Taps(keys=(-1,), mean_rows=(-1,)))
        return Sight(out.tokens, out.taps.mean_rows[-1].mean(dim=1), out.taps.keys[-1].transpose(1, 2).flatten(2))
