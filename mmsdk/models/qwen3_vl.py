"""Qwen3-VL (arXiv 2511.21631): deep features in the first layers of the language model, axes by turns, and seconds as words.

Each step of a clip stands by itself, behind its time in seconds: the middle between its first frame and its last. The time is in the words
alone, so that a step begins anew on all axes, like a picture. Between the clip's two markers, which the chat template writes, each step
has two of its own; so transformers 5 does it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mmsdk.axes import Grid
from mmsdk.encoded import Encoded
from mmsdk.models.text import nested_decoder
from mmsdk.models.types import Assembled
from mmsdk.prompt import LAST, Slot
from mmsdk.quant.types import Quantize
from mmsdk.template import Piece
from mmsdk.vision.encoders.qwen_vl import QwenVL
from mmsdk.vision.tower import TowerConfig
from mmsdk.vision.types import Image, Media
from mmsdk.weights.fields import Fields
from mmsdk.weights.folder import Folder
from mmsdk.weights.llava import language_of
from mmsdk.weights.pictures import CLIP, HALVES
from mmsdk.weights.qwen_vl import activation_of, nested, renamed, resize_of, theta_of, tower_of

__all__ = ["load"]


def load(name: str, found: Folder, dtype: torch.dtype, device: torch.device, quantize: Quantize = "none") -> Assembled:
    """The model of a folder. Raises WeightsError for files that are missing or damaged, ModelError for what cannot be run."""
    found = nested(found, "qwen3_vl_text")
    checkpoint, config = renamed(found), _tower(found.config.group("vision_config"))
    decoder = nested_decoder(found, language_of(checkpoint), dtype, quantize).to(device)
    picture = resize_of(found.pictures, config, (56 * 56, 28 * 28 * 1280), CLIP)
    clip = resize_of(found.clips, config, (128 * 32 * 32, 32 * 32 * 768), HALVES, tokens=768, together=True)
    encoder = QwenVL(tower_of(config, checkpoint, dtype, device), picture, clip)
    return Assembled(
        name=name,
        encoder=encoder,
        connector=lambda tokens: [one.features for one in tokens],
        decoder=decoder,
        template=found.template(decoder.config.vocabulary, "<|image_pad|>", "<|video_pad|>"),
        stands=Stamped(encoder),
        stop_ids=found.stop_ids,
        axes=Grid(),
    )


@dataclass(frozen=True, slots=True)
class Stamped:
    """What stands for a picture: its tokens; for a clip: of each step its seconds, and its tokens between two markers."""

    encoder: QwenVL

    def __call__(self, number: int, item: Media | Encoded) -> Sequence[Piece]:
        """See `mmsdk.models.types.Stands`."""
        if isinstance(item, Image) or (isinstance(item, Encoded) and not item.frames):
            return [Slot(number)]
        if isinstance(item, Encoded):
            times, grid = item.tokens.times, item.tokens.grid
        else:
            times, grid = self.encoder.moments(item.times), self.encoder.grid(item.size, len(item.frames))
        cells, pieces = math.prod(grid[1:]), list[Piece]()
        for step, seconds in enumerate(times.tolist()):
            stop = (step + 1) * cells if step + 1 < grid[0] else LAST
            pieces += [f"<{seconds:.1f} seconds><|vision_start|>", Slot(number, step * cells, stop), "<|vision_end|>"]
        return pieces


def _tower(vision: Fields) -> TowerConfig:
    """What is absent has the defaults of transformers' Qwen3VLVisionConfig."""
    return TowerConfig(
        width=vision.whole("hidden_size", 1152),
        layers=vision.whole("depth", 27),
        heads=vision.whole("num_heads", 16),
        hidden=vision.whole("intermediate_size", 4304),
        language=vision.whole("out_hidden_size", 3584),
        patch=vision.whole("patch_size", 16),
        time=vision.whole("temporal_patch_size", 2),
        merge=vision.whole("spatial_merge_size", 2),
        activation=activation_of(vision, "gelu_pytorch_tanh"),
        patch_bias=True,
        side=math.isqrt(vision.whole("num_position_embeddings", 2304)),
        deep=vision.wholes("deepstack_visual_indexes", (8, 16, 24)),
        theta=theta_of(vision),
    )
