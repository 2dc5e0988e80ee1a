"""Settings of LLaVA-NeXT and its successors as values of `mmsdk.vision.anyres`, and how their pictures stand in a prompt."""

from dataclasses import dataclass
from itertools import pairwise

from jaxtyping import Float
from torch import Tensor

from mmsdk.encoded import Encoded, frames_of
from mmsdk.errors import ModelError
from mmsdk.prompt import LAST, Learned, Slot
from mmsdk.template import Piece
from mmsdk.vision.anyres import AnyRes, Canvas
from mmsdk.vision.pixels import Levels
from mmsdk.vision.types import Media
from mmsdk.vision.vit import ViTConfig
from mmsdk.weights.folder import Folder
from mmsdk.weights.pictures import filter_of, levels_of, square_of

__all__ = ["Rows", "canvas_of"]


@dataclass(frozen=True, slots=True)
class Rows:
    """A picture's overview, then the rows of its plane, each ended by the vector `newline` [1, d].

    A clip stands as it is, `ended` by one such vector or by none.
    """

    views: AnyRes
    newline: Float[Tensor, "1 d"]
    ended: bool = False

    def __call__(self, number: int, item: Media | Encoded) -> list[Piece]:
        """What stands for the visual input `number`."""
        if frames_of(item):
            return [Slot(number), Learned(self.newline)] if self.ended else [Slot(number)]
        rows, _ = self.views.canvas.detail(item.size)
        _, tall, wide = self.views.grid(item.size)
        starts = [0, *((tall + row) * wide for row in range(rows)), LAST]
        overview, *lines = (Slot(number, start, stop) for start, stop in pairwise(starts))
        return [overview, *(piece for line in lines for piece in (line, Learned(self.newline)))]


def canvas_of(folder: Folder, tower: ViTConfig, levels: Levels, most: int = 0) -> Canvas:
    """The canvases of a checkpoint. Raises ModelError where there are none, or tiles do not fit them and the vision tower."""
    pictures, side = folder.pictures, tower.grid * tower.patch
    sizes = pictures.pairs("image_grid_pinpoints") or folder.config.pairs("image_grid_pinpoints")
    if not sizes or any(edge < side or edge % side for size in sizes for edge in size):
        raise ModelError(f"{pictures.where}: image_grid_pinpoints must be sizes made of tiles of {side} pixels, not {sizes}")
    for name in ("size", "crop_size"):
        if pictures.has(name) and square_of(pictures, name, side) != (side, side):
            raise pictures.wrong(name, f"{side} pixels a side, as the vision tower sees them")
    return Canvas(side, tower.grid, sizes, filter_of(pictures, "bicubic"), levels_of(pictures, levels), most)
