"""Qwen2.5-VL (arXiv 2502.13923): Qwen2-VL with windows in most layers of its vision tower, and true seconds on the time axis.

A second takes `tokens_per_second` places, counted from the first frame of a clip to that of each step. transformers counts in equal steps,
which is the same for frames at equal distances; where more steps come in a second than there are places, it has several share one, and
here each step has a place of its own.
"""

import torch

from mmsdk.axes import Grid
from mmsdk.models.text import nested_decoder
from mmsdk.models.types import Assembled
from mmsdk.prompt import Slot
from mmsdk.quant.types import Quantize
from mmsdk.vision.encoders.qwen_vl import QwenVL
from mmsdk.vision.tower import TowerConfig
from mmsdk.weights.fields import Fields
from mmsdk.weights.folder import Folder
from mmsdk.weights.llava import language_of
from mmsdk.weights.pictures import CLIP
from mmsdk.weights.qwen_vl import activation_of, nested, renamed, resize_of, theta_of, tower_of

__all__ = ["load"]


def load(name: str, found: Folder, dtype: torch.dtype, device: torch.device, quantize: Quantize = "none") -> Assembled:
    """The model of a folder. Raises WeightsError for files that are missing or damaged, ModelError for what cannot be run."""
    found = nested(found, "qwen2_5_vl_text")
    vision = found.config.group("vision_config")
    checkpoint, config = renamed(found), _tower(vision)
    decoder = nested_decoder(found, language_of(checkpoint), dtype, quantize).to(device)
    picture = resize_of(found.pictures, config, (56 * 56, 28 * 28 * 1280), CLIP)
    clip = resize_of(found.clips, config, (128 * 28 * 28, 28 * 28 * 768), CLIP, tokens=128_000)
    return Assembled(
        name=name,
        encoder=QwenVL(tower_of(config, checkpoint, dtype, device), picture, clip, moment="first"),
        connector=lambda tokens: [one.features for one in tokens],
        decoder=decoder,
        template=found.template(decoder.config.vocabulary, "<|image_pad|>", "<|video_pad|>"),
        stands=lambda number, _: [Slot(number)],
        stop_ids=found.stop_ids,
        axes=Grid(per_second=vision.real("tokens_per_second", 4.0)),
    )


def _tower(vision: Fields) -> TowerConfig:
    """What is absent has the defaults of transformers' Qwen2_5_VLVisionConfig."""
    patch, merge, layers = vision.whole("patch_size", 14), vision.whole("spatial_merge_size", 2), vision.whole("depth", 32)
    return TowerConfig(
        width=vision.whole("hidden_size", 3584),
        layers=layers,
        heads=vision.whole("num_heads", 16),
        hidden=vision.whole("intermediate_size", 3420),
        language=vision.whole("out_hidden_size", 3584),
        patch=patch,
        time=vision.whole("temporal_patch_size", 2),
        merge=merge,
        activation=activation_of(vision, "silu"),
        gated=True,
        rms=True,
        # a window holds whole tokens
        window=vision.whole("window_size", 112) // merge // patch * merge,
        full=tuple(layer for layer in vision.wholes("fullatt_block_indexes", (7, 15, 23, 31)) if layer < layers),
        theta=theta_of(vision),
    )
