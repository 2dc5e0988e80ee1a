"""InternVL in transformers' layout (InternVL 2.5 and 3, arXiv 2412.05271 and 2504.10479): tiles, a pixel shuffle, a two-layer projector.

A picture is cut into tiles in the shape that is nearest to its own, and looked at once more as a whole, which stands last; between tiles
stands nothing. The frames of a clip are each seen as a whole, and numbered in words.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch

from mmsdk.encoded import Encoded, frames_of
from mmsdk.errors import ModelError
from mmsdk.models.text import nested_decoder
from mmsdk.models.types import Assembled
from mmsdk.prompt import LAST, Slot
from mmsdk.quant.types import Quantize
from mmsdk.template import Piece
from mmsdk.vision.encoders.states import States
from mmsdk.vision.shuffled import Canvas, Shuffled
from mmsdk.vision.tiled import Tiled
from mmsdk.vision.types import Media
from mmsdk.weights.fields import Fields
from mmsdk.weights.folder import Folder
from mmsdk.weights.llava import language_of, projector_of, renamed, tower_of
from mmsdk.weights.pictures import CLIP, filter_of, levels_of, square_of

__all__ = ["load"]


def load(name: str, found: Folder, dtype: torch.dtype, device: torch.device, quantize: Quantize = "none") -> Assembled:
    """The model of a folder. Raises WeightsError for files that are missing or damaged, ModelError for what cannot be run."""
    checkpoint = renamed(found)
    decoder = nested_decoder(found, language_of(checkpoint), dtype, quantize).to(device)
    vit = tower_of(found, checkpoint, "internvl_vision", dtype, device)
    factor = _factor(found.config, vit.config.grid)
    side, width = vit.config.grid * vit.config.patch, vit.config.width * factor**2
    views = Shuffled(_canvas(found.pictures, side), vit.config.grid, factor, width)
    start, end = found.token("start_image_token", "<img>"), found.token("end_image_token", "</img>")
    image, video = found.token("context_image_token", "<IMG_CONTEXT>"), found.token("video_token", "<video>")
    return Assembled(
        name=name,
        encoder=Tiled(States(vit, _layers(found.config)), views),
        connector=projector_of(found.config, checkpoint, width, decoder.config.width, dtype, device, norm=True),
        decoder=decoder,
        template=found.template(decoder.config.vocabulary, image, video),
        stands=_Between(views, start, end),
        stop_ids=found.stop_ids,
    )


@dataclass(frozen=True, slots=True)
class _Between:
    """All views of a picture between two markers; each frame of a clip between its own, on a line that says its number."""

    views: Shuffled
    start: str
    end: str

    def __call__(self, number: int, item: Media | Encoded) -> list[Piece]:
        frames, each = frames_of(item), self.views.side**2
        if not frames:
            return [self.start, Slot(number), self.end]
        slots = [Slot(number, start, stop) for start, stop in pairwise([*range(0, frames * each, each), LAST])]
        lines = [("\n" if frame else "", f"Frame{frame + 1}: {self.start}", slot, self.end) for frame, slot in enumerate(slots)]
        return [piece for line in lines for piece in line]


def _factor(fields: Fields, cells: int) -> int:
    """How many patches a side are joined."""
    ratio = fields.real("downsample_ratio", 0.5)
    factor = round(1 / ratio) if ratio > 0 else 0
    if factor < 1 or abs(factor * ratio - 1) > 1e-6 or cells % factor:
        raise fields.wrong("downsample_ratio", f"one part of a whole number that divides the {cells} patches of a side")
    return factor


def _layers(fields: Fields) -> tuple[int, ...]:
    """Which states are read; none means those after the last norm."""
    (layer,), select = fields.wholes("vision_feature_layer", (-1,)), fields.text("vision_feature_select_strategy", "default")
    if select != "default" or layer == 0:
        raise ModelError(f"{fields.where}: the states {layer} with the strategy {select!r} are not supported")
    if layer == -1 and not fields.group("vision_config").flag("use_mean_pooling", default=True):
        return ()
    return (layer - 1 if layer > 0 else layer,)


def _canvas(pictures: Fields, side: int) -> Canvas:
    size = square_of(pictures, "size", side)
    if size != (side, side):
        raise pictures.wrong("size", f"{side} pixels a side, as the vision tower sees them")
    least, most = pictures.whole("min_patches", 1), pictures.whole("max_patches", 12)
    if not 1 <= least <= most:
        raise pictures.wrong("min_patches", f"a number from 1 to max_patches ({most})")
    return Canvas(size, least, most, filter_of(pictures, "bicubic"), levels_of(pictures, CLIP))
