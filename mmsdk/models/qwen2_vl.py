"""Qwen2-VL (arXiv 2409.12191): pictures and clips at their own aspect, time, row and column as the axes of the language model's heads.

A step of a clip is two frames, and takes one place of the time axis, however long it lasts.
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
    found = nested(found, "qwen2_vl_text")
    checkpoint, config = renamed(found), _tower(found.config.group("vision_config"))
    decoder = nested_decoder(found, language_of(checkpoint), dtype, quantize).to(device)
    picture = resize_of(found.pictures, config, (56 * 56, 28 * 28 * 1280), CLIP)
    clip = resize_of(found.clips, config, (128 * 28 * 28, 28 * 28 * 768), CLIP, tokens=128_000)
    return Assembled(
        name=name,
        encoder=QwenVL(tower_of(config, checkpoint, dtype, device), picture, clip),
        connector=lambda tokens: [one.features for one in tokens],
        decoder=decoder,
        template=found.template(decoder.config.vocabulary, "<|image_pad|>", "<|video_pad|>"),
        stands=lambda number, _: [Slot(number)],
        stop_ids=found.stop_ids,
        axes=Grid(),
    )


def _tower(vision: Fields) -> TowerConfig:
    """What is absent has the defaults of transformers' Qwen2VLVisionConfig."""
    width = vision.whole("embed_dim", 1280)
    return TowerConfig(
        width=width,
        layers=vision.whole("depth", 32),
        heads=vision.whole("num_heads", 16),
        hidden=int(width * vision.real("mlp_ratio", 4.0)),
        language=vision.whole("hidden_size", 3584),
        patch=vision.whole("patch_size", 14),
        time=vision.whole("temporal_patch_size", 2),
        merge=vision.whole("spatial_merge_size", 2),
        activation=activation_of(vision, "quick_gelu"),
        theta=theta_of(vision),
    )
