"""DINOv2 as a vision encoder: all patch tokens after the final norm, scored by the attention of the class token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import ModelError
from mmsdk.vision.encode import Fit, Sight, encode, pooled_grid
from mmsdk.vision.taps import Taps
from mmsdk.vision.types import Media, VisualTokens
from mmsdk.vision.vit import ViT

__all__ = ["Dinov2Encoder"]


@dataclass(frozen=True, slots=True)
class Dinov2Encoder:
    """A `VisionEncoder`. Features are the patch tokens after the final norm, the class token dropped.

    `middle` names layers, counted from 0, whose states, normalised per token, are put behind the final ones: earlier layers say more
    about place and stroke. Saliency is the class token's attention in the last layer, mean over heads; keys are the last layer's, heads
    side by side. The frames of a clip are pooled by `frame_pool` x `frame_pool`; at most `batch` frames are seen at one time.
    """

    vit: ViT
    preprocess: Fit
    frame_pool: int = 2
    middle: tuple[int, ...] = ()
    batch: int = 8

    def __post_init__(self) -> None:
        if not self.vit.config.class_token:
            raise ModelError("Dinov2Encoder scores by the class token, and this vision transformer has none")

    @property
    def width(self) -> int:
        """d, the width of the features."""
        return self.vit.config.width * (1 + len(self.middle))

    def count(self, size: tuple[int, int], frames: int = 1) -> int:
        """How many tokens an input of (height, width) pixels gives; a clip of one frame counts as a picture."""
        t, h, w = pooled_grid(self.preprocess.grid(size), frames, self.frame_pool)
        return t * h * w

    @torch.no_grad()
    def __call__(self, media: Sequence[Media]) -> list[VisualTokens]:
        """The tokens of each input, in order. Raises InputError, with its place, for an input without pixels."""
        return encode(media, self.preprocess, self._see, frame_pool=self.frame_pool, batch=self.batch, like=self.vit.position)

    def _see(self, pixels: Float[Tensor, "b 3 h w"]) -> Sight:
        out = self.vit(pixels, Taps(hidden=self.middle, keys=(-1,), first_rows=(-1,)))
        states = [out.taps.hidden[layer][:, 1:] for layer in self.middle]
        features = torch.cat([out.tokens, *(F.layer_norm(x, x.shape[-1:]) for x in states)], dim=-1)
        keys = out.taps.keys[-1][:, :, 1:].transpose(1, 2).flatten(2)
        return Sight(features, out.taps.first_rows[-1][:, :, 1:].mean(dim=1), keys)
