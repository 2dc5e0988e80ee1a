"""PaliGemma as pi0 uses it: SigLIP sees every camera, one linear map connects it, Gemma reads [images ; words] both ways [published].

(Beyer et al., arXiv 2407.07726; openpi's source.) Words enter Gemma times the root of its width, images as they are connected.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mmsdk.decoder.transformer import Decoder
from mmsdk.stages import Context
from mmsdk.vision.vit import ViT
from mmsdk.vla.heads.prefix import prefill_sight

__all__ = ["PaliGemma"]


@dataclass(frozen=True, slots=True)
class PaliGemma:
    """The parts of a checkpoint that make the prefix."""

    vit: ViT
    connector: nn.Linear
    decoder: Decoder

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
        """What the decoder knows after c camera images in [-1, 1], in the model's order, and the words `ids` where `said`.

        A camera that is not `present` is seen by nothing (pi0, pi0.5); pi0-FAST takes its black image for real.
        """
        pixels, present, ids, said = (given.to(self.decoder.embedding.weight.device) for given in (pixels, present, ids, said))
        return prefill_sight(self.decoder, self._pictures(pixels), present, ids, said, room)

    def _pictures(self, pixels: Float[Tensor, "b c 3 h w"]) -> Float[Tensor, "i n d"]:
        connected: Tensor = self.connector(self.vit(pixels.flatten(0, 1)).tokens)
        return connected
