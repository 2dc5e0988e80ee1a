"""DINOv2 (arXiv 2304.07193): all patch tokens after the final norm, scored by the attention of the class token."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import ModelError
from mmsdk.vision.encode import Sight
from mmsdk.vision.prune import Pruning
from mmsdk.vision.shorten import WHOLE, Shortening
from mmsdk.vision.taps import Taps
from mmsdk.vision.vit import ViT

__all__ = ["Dinov2"]


@dataclass(frozen=True, slots=True)
class Dinov2:
    """A `Backbone`. Features are the patch tokens after the final norm, the class token dropped.

    `middle` names layers, counted from 0, whose states, normalised per token, are put behind the final ones: earlier layers say more
    about place and stroke. Saliency is the class token's attention in the last layer, mean over heads; keys are the last layer's.
    """

    vit: ViT
    middle: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.vit.config.class_token:
            raise ModelError("DINOv2 scores by the class token, and this vision transformer has none")

    @property
    def width(self) -> int:
        """d, the width of the features."""
        return self.vit.config.width * (1 + len(self.middle))

    def __call__(self, pixels: Float[Tensor, "b 3 y x"], shortening: Shortening | Pruning = WHOLE) -> Sight:
        """Final states, and the middle ones behind them."""
        out = self.vit(pixels, Taps(hidden=self.middle, keys=(-1,), first_rows=(-1,)), shortening)
        states = [out.taps.hidden[layer][:, 1:] for layer in self.middle]
        features = torch.cat([out.tokens, *(F.layer_norm(x, x.shape[-1:]) for x in states)], dim=-1)
        return Sight.of(features, out.taps.first_rows[-1][..., 1:], out.taps.keys[-1][:, :, 1:], out.groups)
