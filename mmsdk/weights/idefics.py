"""What checkpoints of Idefics3 and SmolVLM have in common: their parts, and how a picture in tiles stands in a prompt.

Each tile stands behind a marker and the token of its row and column, each row of tiles ends a line, and the whole picture comes last.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mmsdk.encoded import Encoded, frames_of
from mmsdk.prompt import LAST, Slot
from mmsdk.template import Piece
from mmsdk.vision.encoders.states import States
from mmsdk.vision.projector import Projected
from mmsdk.vision.shuffled import Shuffled, Splitting
from mmsdk.vision.tiled import Tiled
from mmsdk.vision.types import Media
from mmsdk.vision.weights import vit_from_transformers
from mmsdk.weights.fields import Fields
from mmsdk.weights.folder import Folder
from mmsdk.weights.modules import filled
from mmsdk.weights.pictures import HALVES, filter_of, levels_of
from mmsdk.weights.safetensors import Checkpoint

__all__ = ["IMAGE", "Pictures", "language_of", "projector_of", "renamed", "sight_of"]

IMAGE = "<image>"
_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"
_TOWER, _CONNECTOR, _LANGUAGE, _HEAD = "model.vision_model.", "model.connector.", "model.text_model.", "lm_head."
_FAMILY = "idefics3_vision"


class _Connector(nn.Module):
    """The matrix from joined patches to embeddings, under the names of checkpoints."""

    def __init__(self, vision: int, language: int) -> None:
        super().__init__()
        self.modality_projection = nn.ModuleDict({"proj": nn.Linear(vision, language, bias=False)})

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n e"]:
        """Width d in, width e out."""
        embeddings: Tensor = self.modality_projection["proj"](x)
        return embeddings


def renamed(folder: Folder) -> Checkpoint:
    """The tensors. Raises ModelError for any that is not of a known part."""
    folder.checkpoint.only(_TOWER, _CONNECTOR, _LANGUAGE, _HEAD)
    return folder.checkpoint


def language_of(checkpoint: Checkpoint) -> Checkpoint:
    """The tensors of the language model, named as those of a text model alone."""
    return checkpoint.under(_LANGUAGE, "model.").beside(checkpoint.under(_HEAD, _HEAD))


def sight_of(folder: Folder, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> tuple[Tiled, Shuffled]:
    """The encoder, and its views. Raises ModelError where tiles and patches do not fit the vision tower."""
    vision, tensors = folder.config.group("vision_config"), checkpoint.under(_TOWER)
    settings = {**{name: value for name, value in vision.values.items() if value is not None}, "model_type": _FAMILY}
    vit = vit_from_transformers(settings, {name: tensors.tensor(name) for name in tensors.files}, name=vision.where).to(device, dtype)
    cells, factor = vit.config.grid, folder.config.whole("scale_factor", 2)
    if factor < 1 or cells % factor:
        raise folder.config.wrong("scale_factor", f"what divides the {cells} patches of a side")
    tiling = _tiling(folder, cells * vit.config.patch)
    views = Shuffled(tiling, cells, factor, vit.config.width * factor**2)
    return Tiled(States(vit), views), views


def projector_of(checkpoint: Checkpoint, vision: int, language: int, dtype: torch.dtype, device: torch.device) -> Projected:
    """The matrix from joined patches to embeddings."""
    with torch.device("meta"):
        connector = _Connector(vision, language)
    return Projected(filled(connector, checkpoint.under(_CONNECTOR), dtype, device, "the connector"))


def _tiling(folder: Folder, side: int) -> Splitting:
    pictures, clips = folder.pictures, folder.clips
    tile = pictures.group("max_image_size").whole("longest_edge", side)
    if tile != side:
        raise pictures.wrong("max_image_size", f"{side} pixels, as the vision tower sees them")
    longest = _longest(pictures, 4 * side)
    sampled = clips.group("video_sampling")
    moving = sampled.group("video_size").whole("longest_edge", _longest(clips, side))
    if min(longest, moving) < 1:
        raise pictures.wrong("size", "a longest_edge of at least one pixel, as that of clips")
    split, levels = pictures.flag("do_image_splitting", default=True), levels_of(pictures, HALVES)
    return Splitting(side, longest, moving, split, filter_of(pictures, "lanczos"), levels)


def _longest(fields: Fields, default: int) -> int:
    return fields.group("size").whole("longest_edge", default)


@dataclass(frozen=True, slots=True)
class Pictures:
    """A picture as its tiles, or as a whole alone; the frames of a clip as wholes, one after another."""

    views: Shuffled

    def __call__(self, number: int, item: Media | Encoded) -> list[Piece]:
        """What stands for the visual input `number`."""
        if frames := frames_of(item):
            return [piece for slot in self.slots(number, frames) for piece in self.whole(slot)]
        *tiles, last = self.slots(number, self.views.views(item.size))
        rows, columns = self.views.tiling.shape(item.size)
        places = [(row, column) for row in range(rows) for column in range(columns)]
        pieces: list[Piece] = []
        for (row, column), slot in zip(places, tiles, strict=True):
            pieces += [f"{_AROUND}<row_{row + 1}_col_{column + 1}>", slot, "\n" if column == columns - 1 else ""]
        return [*pieces, "\n" if tiles else "", *self.whole(last)]

    def slots(self, number: int, views: int) -> list[Slot]:
        """The places of an input's views."""
        each = self.views.side**2
        return [Slot(number, start, stop) for start, stop in pairwise([*range(0, views * each, each), LAST])]

    def whole(self, slot: Slot) -> list[Piece]:
        """A view of a whole picture."""
        return [_AROUND + _WHOLE, slot, _AROUND]
