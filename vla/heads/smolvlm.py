"""SmolVLM2 as SmolVLA uses it: SigLIP, a pixel shuffle and one linear map, SmolLM2's first layers [published].

(Marafioti et al., arXiv 2504.05299; lerobot's source.) Images and words enter the decoder times the root of its width; the prefix is
bidirectional. SmolVLA adds the state behind it.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mmsdk.decoder.transformer import Decoder
from mmsdk.stages import Context
from mmsdk.vision.vit import ViT
from mmsdk.vla.heads.prefix import prefill_sight

__all__ = ["SmolVLM", "pixel_shuffle"]


@dataclass(frozen=True, slots=True)
class SmolVLM:
    """The parts of a checkpoint that make the prefix; `shuffle` x `shuffle` patches become one token."""

    vit: ViT
    connector: nn.Linear
    decoder: Decoder
    shuffle: int = 4

    def see(self, pixels: Float[Tensor, "b c 3 h w"]) -> Float[Tensor, "b n d"]:
        """Visual tokens of c camera images in [-1, 1], camera by camera, as they enter the decoder."""
        seen: Tensor = self._pictures(pixels).unflatten(0, pixels.shape[:2]).flatten(1, 2)
        return seen

    @torch.no_grad()
    def prefix(
        self,
        pixels: Float[Tensor, "b c 3 h w"],
        present: Bool[Tensor, "b c"],
        ids: Int[Tensor, "b s"],
        said: Bool[Tensor, "b s"],
        room: int = 0,
    ) -> Context:
        """What the decoder knows after c camera images in [-1, 1] and the words `ids` where `said`; it has room for a state's token."""
        pixels, present, ids, said = (given.to(self.decoder.embedding.weight.device) for given in (pixels, present, ids, said))
        return prefill_sight(self.decoder, self._pictures(pixels), present, ids, said, room)

    def _pictures(self, pixels: Float[Tensor, "b c 3 h w"]) -> Float[Tensor, "i n d"]:
        connected: Tensor = self.connector(pixel_shuffle(self.vit(pixels.flatten(0, 1)).tokens, self.shuffle))
        scale: float = self.decoder.config.width**0.5
        return connected * scale


def pixel_shuffle(tokens: Float[Tensor, "b n d"], factor: int) -> Float[Tensor, "b m e"]:
    """Each square of factor x factor patches as one token, e = factor^2 d, its patches side by side in reading order."""
    b, n, d = tokens.shape
    side = round(n**0.5) // factor
    squares = tokens.view(b, side, factor, side, factor, d).transpose(2, 3)
    return squares.reshape(b, side * side, factor * factor * d)
