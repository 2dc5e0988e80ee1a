"""LLaVA-1.5 (Visual Instruction Tuning, arXiv 2304.08485; Improved Baselines, arXiv 2310.03744): one square view, a two-layer projector.

A picture is resized by its shorter side, and the middle is cut out; every patch of CLIP's last layer but one is a token. The family has no
clips of its own: the frames of one are seen as pictures, and stand one after another in one place.
"""

import torch

from mmsdk.encoded import Encoded
from mmsdk.errors import ModelError
from mmsdk.models.text import nested_decoder
from mmsdk.models.types import Assembled
from mmsdk.prompt import Slot
from mmsdk.quant.types import Quantize
from mmsdk.template import Piece
from mmsdk.vision.encode import Encoder
from mmsdk.vision.types import Media
from mmsdk.weights.folder import Folder
from mmsdk.weights.llava import language_of, projector_of, renamed, states_of, tower_of
from mmsdk.weights.pictures import prepare_of

__all__ = ["load"]


def load(name: str, found: Folder, dtype: torch.dtype, device: torch.device, quantize: Quantize = "none") -> Assembled:
    """The model of a folder. Raises WeightsError for files that are missing or damaged, ModelError for what cannot be run."""
    checkpoint = renamed(found)
    decoder = nested_decoder(found, language_of(checkpoint), dtype, quantize).to(device)
    vit = tower_of(found, checkpoint, "clip_vision_model", dtype, device)
    states = states_of(found.config, vit, layer=-2, select="default")
    prepare = prepare_of(found.pictures, vit.config.patch, vit.config.grid * vit.config.patch)
    if prepare.grid((1, 1)) != (vit.config.grid, vit.config.grid):
        raise ModelError(f"{found.path}: its pictures have {prepare.grid((1, 1))} patches, its vision tower {vit.config.grid} a side")
    return Assembled(
        name=name,
        encoder=Encoder(states, prepare, frame_pool=1),
        connector=projector_of(found.config, checkpoint, states.width, decoder.config.width, dtype, device),
        decoder=decoder,
        template=found.template(decoder.config.vocabulary, image=found.token("image_token", "<image>")),
        stands=_stands,
        stop_ids=found.stop_ids,
    )


def _stands(number: int, item: Media | Encoded) -> list[Piece]:
    return [Slot(number)]
