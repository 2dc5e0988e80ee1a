"""A tower of CLIP's or SigLIP's shape, read as LLaVA's successors do: patch states after one layer or several, side by side.

Scored by the class token where there is one, as in `clip`, else by what a patch receives from the others, as in `siglip`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import ModelError
from mmsdk.vision.encode import Sight
from mmsdk.vision.prune import Pruning
from mmsdk.vision.shorten import WHOLE, Shortening
from mmsdk.vision.taps import Taps
from mmsdk.vision.vit import ViT

__all__ = ["States"]


@dataclass(frozen=True, slots=True)
class States:
    """A `Backbone`. Features are the patch states after `layers`, counted from 0 or back from -1, without a norm or the class token.

    No layer at all means the states after the last layer and its norm. Saliency and keys are those of the last of the layers.
    """

    vit: ViT
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        depth = self.vit.config.layers
        if not all(-depth <= layer < depth for layer in self.layers):
            raise ModelError(f"the model reads the layers {self.layers} of its vision tower, which has {depth}")

    @property
    def width(self) -> int:
        """d, the width of the features."""
        return self.vit.config.width * max(1, len(self.layers))

    def __call__(self, pixels: Float[Tensor, "b 3 y x"], shortening: Shortening | Pruning = WHOLE) -> Sight:
        """All of it in one pass."""
        first, last = int(self.vit.config.class_token), self.layers[-1:] or (-1,)
        taps = Taps(hidden=self.layers, keys=last, first_rows=last, mean_rows=()) if first else Taps(self.layers, (), last, (), last)
        out = self.vit(pixels, taps, shortening)
        # behind class tokens, and behind patches of which nothing is made
        begin = out.groups.first
        features = [out.taps.hidden[layer][:, begin:] for layer in self.layers] or [out.tokens]
        rows = (out.taps.first_rows if first else out.taps.mean_rows)[last[0]]
        return Sight.of(torch.cat(features, dim=-1), rows[..., begin:], out.taps.keys[last[0]][:, :, begin:], out.groups)
