"""Pictures seen as one square whose patches are averaged, so many a side, into a fixed number of tokens: Gemma 3.

Letters: v views of an input (one, or a clip's frames), n patches of a view, m tokens of it, d width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mmsdk.vision.cells import cells_of
from mmsdk.vision.merged import Merged, together
from mmsdk.vision.prepare import Prepare
from mmsdk.vision.shorten import Area, Shortened
from mmsdk.vision.tiled import Viewed
from mmsdk.vision.types import Media, Video, VisualTokens

__all__ = ["Pooled"]


@dataclass(frozen=True, slots=True)
class Pooled:
    """`Views` of `cells` x `cells` patches, of which `pool` x `pool` make one token; what is left over at the edges is not looked at."""

    prepare: Prepare
    cells: int
    pool: int
    width: int

    @property
    def side(self) -> int:
        """Rows and columns of a view's tokens."""
        return self.cells // self.pool

    def count(self, size: tuple[int, int], frames: int) -> int:
        """See `mmsdk.vision.tiled.Views`."""
        return max(frames, 1) * self.side**2

    def cut(self, item: Media) -> Float[Tensor, "v 3 y x"]:
        """See `mmsdk.vision.tiled.Views`."""
        return self.prepare(item.frames if isinstance(item, Video) else item.pixels[None])

    def tokens(self, item: Media, viewed: Viewed) -> VisualTokens:
        """See `mmsdk.vision.tiled.Views`."""
        features, saliency, keys = (self._means(x) for x in (viewed.features, viewed.saliency[..., None], viewed.keys))
        grid, device = (len(viewed.features), self.side, self.side), features.device
        times = item.times.to(device) if isinstance(item, Video) else torch.zeros(1, device=device)
        weight = torch.full((len(features),), float(self.pool**2), device=device)
        return VisualTokens(features, cells_of(grid, device), weight, grid, times, saliency[:, 0], keys)

    def areas(self, size: tuple[int, int], frames: int) -> list[Area]:
        """See `mmsdk.vision.tiled.Views`: what is averaged into one token merges as one."""
        return [Area(0, self.cells, 0, self.cells, self.pool)] * max(frames, 1)

    def merged(self, item: Media, views: Sequence[Merged]) -> Shortened:
        """See `mmsdk.vision.tiled.Views`."""
        grid, each = (len(views), self.side, self.side), self.pool**2
        means = [replace(one, features=one.features.unflatten(1, (each, -1)).mean(1), weight=one.weight * each) for one in views]
        places = [F.pad(view.places, (1, 0), value=number) for number, view in enumerate(views)]
        cells, times = cells_of(grid, places[0].device), item.times if isinstance(item, Video) else torch.zeros(1)
        return together(means, places, [cells], grid, times)

    def _means(self, x: Float[Tensor, "v n d"]) -> Float[Tensor, "m d"]:
        planes = x.transpose(1, 2).unflatten(2, (self.cells, self.cells))
        return F.avg_pool2d(planes, self.pool).flatten(2).transpose(1, 2).flatten(0, 1)
