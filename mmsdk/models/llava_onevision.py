"""LLaVA-OneVision (arXiv 2408.03326): one model for pictures at any resolution, several pictures, and clips.

An overview and the tiles of a canvas (`mmsdk.vision.anyres`) go through SigLIP and a two-layer projector. The plane is made of embeddings,
so that features are these: where it has more patches than `anyres_max_N` tiles hold it is scaled down, and a learned vector ends each of
its rows. The frames of a clip are halved in rows and columns, and one such vector ends the clip.

Each picture is looked at in tiles, however many there are in a prompt: as transformers' processor does where pictures come in one list.
"""

import re

import torch

from mmsdk.models.text import nested_decoder
from mmsdk.models.types import Assembled
from mmsdk.quant.types import Quantize
from mmsdk.vision.anyres import AnyRes, halved
from mmsdk.vision.projector import Unchanged
from mmsdk.vision.tiled import Tiled
from mmsdk.weights.anyres import Rows, canvas_of
from mmsdk.weights.fields import Fields
from mmsdk.weights.folder import Folder
from mmsdk.weights.llava import NEWLINE, language_of, newline_of, projector_of, renamed, states_of, tower_of
from mmsdk.weights.pictures import CLIP, prepare_of

__all__ = ["load"]


def load(name: str, found: Folder, dtype: torch.dtype, device: torch.device, quantize: Quantize = "none") -> Assembled:
    """The model of a folder. Raises WeightsError for files that are missing or damaged, ModelError for what cannot be run."""
    checkpoint = renamed(found, NEWLINE)
    decoder = nested_decoder(found, language_of(checkpoint), dtype, quantize).to(device)
    vit = tower_of(found, checkpoint, "siglip_vision_model", dtype, device)
    states, tower, width = states_of(found.config, vit, layer=-1, select="full"), vit.config, decoder.config.width
    project = projector_of(found.config, checkpoint, states.width, width, dtype, device).projector
    frames = prepare_of(found.clips, tower.patch, tower.grid * tower.patch)
    canvas = canvas_of(found, tower, CLIP, _most(found.config))
    # halves of an even side are means of two patches
    views = AnyRes(canvas, frames, width, project, halved, (tower.grid + 1) // 2, 1 if tower.grid % 2 else 2)
    return Assembled(
        name=name,
        encoder=Tiled(states, views),
        connector=Unchanged(),
        decoder=decoder,
        template=found.template(decoder.config.vocabulary, found.token("image_token", "<image>"), found.token("video_token", "<video>")),
        stands=Rows(views, newline_of(checkpoint, width, dtype, device), ended=True),
        stop_ids=found.stop_ids,
    )


def _most(fields: Fields) -> int:
    """How many tiles a plane may have the patches of. Raises ModelError where settings do not say."""
    said = fields.text("vision_aspect_ratio", "anyres_max_9")
    number = re.fullmatch(r"anyres_max_(\d+)", said)
    if number is None or not int(number[1]):
        raise fields.wrong("vision_aspect_ratio", "'anyres_max_N'")
    return int(number[1])
