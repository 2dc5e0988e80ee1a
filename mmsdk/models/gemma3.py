"""Gemma 3 with sight (arXiv 2503.19786): one square view, its patches averaged into a fixed number of tokens that see one another.

The model has no clips of its own: the frames of one stand as one long picture between the same two markers.
"""

from dataclasses import dataclass
from math import isqrt

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mmsdk.decoder.norm import RMSNorm
from mmsdk.encoded import Encoded
from mmsdk.errors import ModelError
from mmsdk.models.text import nested_decoder
from mmsdk.models.types import Assembled
from mmsdk.prompt import Slot
from mmsdk.quant.types import Quantize
from mmsdk.template import Piece
from mmsdk.vision.encoders.states import States
from mmsdk.vision.pooled import Pooled
from mmsdk.vision.projector import Projected
from mmsdk.vision.tiled import Tiled
from mmsdk.vision.types import Media
from mmsdk.vision.vit import ViTConfig
from mmsdk.weights.folder import Folder
from mmsdk.weights.llava import language_of, renamed, tower_of
from mmsdk.weights.modules import filled
from mmsdk.weights.pictures import HALVES, prepare_of

__all__ = ["load"]

_PROJECTOR = "model.multi_modal_projector."


class _Projector(nn.Module):
    """A norm and a matrix, under the names of checkpoints."""

    def __init__(self, vision: int, language: int, eps: float) -> None:
        super().__init__()
        self.mm_soft_emb_norm = RMSNorm(vision, eps, offset=1.0)
        self.mm_input_projection_weight = nn.Parameter(torch.empty(vision, language))

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n e"]:
        """Width d in, width e out."""
        embeddings: Tensor = self.mm_soft_emb_norm(x) @ self.mm_input_projection_weight
        return embeddings


def load(name: str, found: Folder, dtype: torch.dtype, device: torch.device, quantize: Quantize = "none") -> Assembled:
    """The model of a folder. Raises WeightsError for files that are missing or damaged, ModelError for what cannot be run."""
    found = found.with_text("gemma3_text")
    if found.pictures.flag("do_pan_and_scan", default=False):
        raise ModelError(f"{found.pictures.where}: crops of a picture beside it (do_pan_and_scan) are not supported")
    checkpoint = renamed(found)
    decoder = nested_decoder(found, language_of(checkpoint), dtype, quantize, sees="pictures").to(device)
    vit = tower_of(found, checkpoint, "siglip_vision_model", dtype, device)
    tower, pool = vit.config, _pool(found, vit.config)
    prepare = prepare_of(found.pictures, tower.patch, tower.grid * tower.patch, HALVES, "bilinear")
    with torch.device("meta"):
        projector = _Projector(tower.width, decoder.config.width, tower.eps)
    begin, end = found.token("boi_token", "<start_of_image>"), found.token("eoi_token", "<end_of_image>")
    return Assembled(
        name=name,
        encoder=Tiled(States(vit), Pooled(prepare, tower.grid, pool, tower.width)),
        connector=Projected(filled(projector, checkpoint.under(_PROJECTOR), dtype, device, "the projector")),
        decoder=decoder,
        template=found.template(decoder.config.vocabulary, begin),
        stands=_Between(begin, end),
        stop_ids=found.stop_ids,
    )


@dataclass(frozen=True, slots=True)
class _Between:
    """A picture between two markers, with empty lines around."""

    begin: str
    end: str

    def __call__(self, number: int, item: Media | Encoded) -> list[Piece]:
        return [f"\n\n{self.begin}", Slot(number), f"{self.end}\n\n"]


def _pool(folder: Folder, tower: ViTConfig) -> int:
    """How many patches a side make one token."""
    tokens = folder.config.whole("mm_tokens_per_image", 256)
    side = isqrt(max(tokens, 0))
    if side < 1 or side * side != tokens or tower.grid // side < 1 or tower.grid // (tower.grid // side) != side:
        raise folder.config.wrong("mm_tokens_per_image", f"a square that fits the {tower.grid} patches of a side")
    return tower.grid // side
