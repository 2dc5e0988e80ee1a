"""CLIP (arXiv 2103.00020) in the way of LLaVA (arXiv 2304.08485): patch states before the last layer, scored by the class token."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import ModelError
from mmsdk.vision.encode import Sight
from mmsdk.vision.prune import Pruning
from mmsdk.vision.shorten import WHOLE, Shortening
from mmsdk.vision.taps import Taps
from mmsdk.vision.vit import ViT

__all__ = ["Clip"]


@dataclass(frozen=True, slots=True)
class Clip:
    """A `Backbone`. Features are the patch states after `layer` (-2: after the last but one), without a norm or the class token.

    Saliency is the class token's attention in that layer, mean over heads, which is what VisionZip and FasterVLM score by; keys are that
    layer's.
    """

    vit: ViT
    layer: int = -2

    def __post_init__(self) -> None:
        if not self.vit.config.class_token:
            raise ModelError("CLIP scores by the class token, and this vision transformer has none; use Siglip")

    @property
    def width(self) -> int:
        """d, the width of the features."""
        return self.vit.config.width

    def __call__(self, pixels: Float[Tensor, "b 3 y x"], shortening: Shortening | Pruning = WHOLE) -> Sight:
        """All of it from one layer."""
        at = (self.layer,)
        out = self.vit(pixels, Taps(hidden=at, keys=at, first_rows=at), shortening)
        features, rows, keys = (read[self.layer] for read in (out.taps.hidden, out.taps.first_rows, out.taps.keys))
        return Sight.of(features[:, 1:], rows[..., 1:], keys[:, :, 1:], out.groups)
