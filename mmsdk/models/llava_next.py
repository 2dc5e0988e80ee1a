"""LLaVA-NeXT, also called LLaVA-1.6 (llava-vl.github.io/blog/2024-01-30-llava-next): pictures at any resolution.

An overview and the tiles of a canvas (`mmsdk.vision.anyres`) go through CLIP and a two-layer projector; a learned vector ends each row of
the plane. The family has no clips of its own: the frames of one are seen as overviews.
"""

import torch

from mmsdk.models.text import nested_decoder
from mmsdk.models.types import Assembled
from mmsdk.quant.types import Quantize
from mmsdk.vision.anyres import AnyRes, pooled
from mmsdk.vision.tiled import Tiled
from mmsdk.weights.anyres import Rows, canvas_of
from mmsdk.weights.folder import Folder
from mmsdk.weights.llava import NEWLINE, language_of, newline_of, projector_of, renamed, states_of, tower_of
from mmsdk.weights.pictures import CLIP, prepare_of

__all__ = ["load"]


def load(name: str, found: Folder, dtype: torch.dtype, device: torch.device, quantize: Quantize = "none") -> Assembled:
    """The model of a folder. Raises WeightsError for files that are missing or damaged, ModelError for what cannot be run."""
    checkpoint = renamed(found, NEWLINE)
    decoder = nested_decoder(found, language_of(checkpoint), dtype, quantize).to(device)
    vit = tower_of(found, checkpoint, "clip_vision_model", dtype, device)
    states, tower = states_of(found.config, vit, layer=-2, select="default"), vit.config
    frames = prepare_of(found.pictures, tower.patch, tower.grid * tower.patch)
    views = AnyRes(canvas_of(found, tower, CLIP), frames, states.width, torch.nn.Identity(), pooled(1), tower.grid)
    return Assembled(
        name=name,
        encoder=Tiled(states, views),
        connector=projector_of(found.config, checkpoint, states.width, decoder.config.width, dtype, device),
        decoder=decoder,
        template=found.template(decoder.config.vocabulary, image=found.token("image_token", "<image>")),
        stands=Rows(views, newline_of(checkpoint, decoder.config.width, dtype, device)),
        stop_ids=found.stop_ids,
    )
