"""SigLIP (arXiv 2303.15343): all patch tokens after the final norm. It has no class token, so patches are scored by one another."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import ModelError
from mmsdk.vision.encode import Sight
from mmsdk.vision.prune import Pruning
from mmsdk.vision.shorten import WHOLE, Shortening
from mmsdk.vision.taps import Taps
from mmsdk.vision.vit import ViT

__all__ = ["Siglip"]


@dataclass(frozen=True, slots=True)
class Siglip:
    """A `Backbone`. Features are the patch tokens after the final norm.

    Saliency is the attention a patch receives in the last layer, mean over all querying patches and heads, the usual stand-in where there
    is no class token; keys are that layer's.
    """

    vit: ViT

    def __post_init__(self) -> None:
        if self.vit.config.class_token:
            raise ModelError("SigLIP takes every token for a patch, and this vision transformer has a class token")

    @property
    def width(self) -> int:
        """d, the width of the features."""
        return self.vit.config.width

    def __call__(self, pixels: Float[Tensor, "b 3 y x"], shortening: Shortening | Pruning = WHOLE) -> Sight:
        """Final states, scored by the mean row of the last layer's attention."""
        out = self.vit(pixels, Taps(keys=(-1,), mean_rows=(-1,)), shortening)
        return Sight.of(out.tokens, out.taps.mean_rows[-1], out.taps.keys[-1], out.groups)
