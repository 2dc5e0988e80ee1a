"""LLaVA-NeXT-Video (llava-vl.github.io/blog/2024-04-30-llava-next-video): LLaVA-NeXT whose clips are pooled frame by frame.

Pictures are LLaVA-NeXT's: an overview and the tiles of a canvas, a learned vector at the end of each row. Of a clip's frames the states of
CLIP are averaged over `spatial_pool_stride` x `spatial_pool_stride` patches in front of the projector; nothing stands between frames.
"""

import torch

from mmsdk.errors import ModelError
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
    mode, stride = found.config.text("spatial_pool_mode", "average"), found.config.whole("spatial_pool_stride", 2)
    if mode != "average" or not 1 <= stride <= tower.grid:
        raise ModelError(f"{found.config.where}: pooling {mode!r} of {stride} patches is not supported; supported: average, in the grid")
    frames = prepare_of(found.clips, tower.patch, tower.grid * tower.patch)
    side = tower.grid // stride
    views = AnyRes(canvas_of(found, tower, CLIP), frames, states.width, torch.nn.Identity(), pooled(stride), side, stride)
    return Assembled(
        name=name,
        encoder=Tiled(states, views),
        connector=projector_of(found.config, checkpoint, states.width, decoder.config.width, dtype, device),
        decoder=decoder,
        template=found.template(decoder.config.vocabulary, found.token("image_token", "<image>"), found.token("video_token", "<video>")),
        stands=Rows(views, newline_of(checkpoint, decoder.config.width, dtype, device)),
        stop_ids=found.stop_ids,
    )
