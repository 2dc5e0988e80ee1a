"""The eyes of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures and clips at their own aspect, through a tower that merges squares of patches.

Tokens are those of the merged grid, as wide as the language model; nothing has to be projected afterwards. A clip is seen in steps of a few
frames, the last of which is repeated where some are missing.

Letters: f frames, s steps, b steps in one batch, n patches of a step, c numbers of a patch.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vision.cells import cells_of
from mmsdk.vision.merged import Merged, planned, together
from mmsdk.vision.shorten import Area, Shortened, Shortener, Shortening
from mmsdk.vision.smart_resize import SmartResize
from mmsdk.vision.tower import Tower, TowerOutput
from mmsdk.vision.tower_merged import merged
from mmsdk.vision.types import Media, Video, VisualTokens

__all__ = ["QwenVL"]

Step = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class QwenVL:
    """A `ShorteningEncoder`. `picture` and `clip` say at what size each is seen; a clip of one frame is sized as a picture.

    `moment` of a step is that of its first frame, or the middle of its first and last. At most `batch` patches are seen at one time, and
    one step at least. Saliency is the attention that a token's patches receive in the last layer that sees whole frames.
    """

    tower: Tower
    picture: SmartResize
    clip: SmartResize
    moment: Literal["first", "middle"] = "middle"
    batch: int = 8192

    @property
    def width(self) -> int:
        """d, the width of the features."""
        return self.tower.config.language

    def grid(self, size: tuple[int, int], frames: int = 1) -> tuple[int, int, int]:
        """(steps, rows, columns) of tokens for frames of (height, width) pixels. Raises InputError for pixels of an extreme aspect."""
        fit = self.clip if frames > 1 else self.picture
        rows, columns = fit.grid(size, frames)
        return -(-frames // fit.time), rows // fit.merge, columns // fit.merge

    def count(self, size: tuple[int, int], frames: int = 1) -> int:
        """How many tokens an input of (height, width) pixels gives, without encoding it."""
        steps, rows, columns = self.grid(size, frames)
        return steps * rows * columns

    def moments(self, times: Float[Tensor, " f"]) -> Float[Tensor, " s"]:
        """The seconds of each step of frames at these."""
        steps: Tensor = _filled(times, self.clip.time).unflatten(0, (-1, self.clip.time))
        return steps[:, 0] if self.moment == "first" else (steps[:, 0] + steps[:, -1]) / 2

    @torch.no_grad()
    def __call__(self, media: Sequence[Media]) -> list[VisualTokens]:
        """The tokens of each input, in input order; steps of one grid run together.

        Raises InputError, with its place, for an input without pixels or of an extreme aspect.
        """
        grids = [self._grid(i, item) for i, item in enumerate(media)]
        members: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, (_, rows, columns) in enumerate(grids):
            members[rows, columns].append(i)
        found: dict[int, list[TowerOutput]] = defaultdict(list)
        for (rows, columns), inputs in members.items():
            grid = rows * self.picture.merge, columns * self.picture.merge
            for steps in _batches({i: grids[i][0] for i in inputs}, max(1, self.batch // (grid[0] * grid[1]))):
                patches = torch.cat([self._patches(media[i], start, stop, grid) for i, start, stop in steps])
                for (i, _, _), seen in zip(
                    steps, _parts(self.tower(patches, grid), [stop - start for _, start, stop in steps]), strict=True
                ):
                    found[i].append(seen)
        return [self._tokens(item, found[i], grids[i]) for i, item in enumerate(media)]

    def plan(self, size: tuple[int, int], frames: int, by: Shortener, count: int) -> list[Shortening]:
        """How each step of an input comes to its part of `count` tokens; the parts differ by one at most.

        Raises BudgetError where a step would have no token, or the method cannot get there.
        """
        steps, rows, columns = self.grid(size, frames)
        merge = self.picture.merge
        return planned([Area(0, rows * merge, 0, columns * merge, merge)] * steps, by, count, self.tower.config.layers)

    @torch.no_grad()
    def shortened(self, media: Sequence[Media], plans: Sequence[Sequence[Shortening]]) -> list[Shortened]:
        """The tokens of each input, in input order, by one plan a step; steps of one plan run together.

        Raises InputError, with its place, for an input without pixels or of an extreme aspect.
        """
        grids = [self._grid(i, item) for i, item in enumerate(media)]
        runs: dict[Shortening, list[tuple[int, int]]] = defaultdict(list)
        for i, steps in enumerate(plans):
            for step, plan in enumerate(steps):
                runs[plan].append((i, step))
        found: dict[tuple[int, int], Merged] = {}
        for plan, members in runs.items():
            (area,) = plan.area
            grid = area.bottom, area.right
            most = max(1, self.batch // (grid[0] * grid[1]))
            for part in (members[start : start + most] for start in range(0, len(members), most)):
                patches = torch.cat([self._patches(media[i], step, step + 1, grid) for i, step in part])
                found |= dict(zip(part, merged(self.tower, patches, grid, plan), strict=True))
        return [self._merged(item, [found[i, step] for step in range(grids[i][0])], grids[i]) for i, item in enumerate(media)]

    def _merged(self, item: Media, steps: Sequence[Merged], grid: tuple[int, int, int]) -> Shortened:
        places = [F.pad(step.places, (1, 0), value=t) for t, step in enumerate(steps)]
        patches = [replace(step, weight=step.weight * each) for step, each in zip(steps, self._weights(item, grid[0]), strict=True)]
        times = self.moments(item.times) if isinstance(item, Video) else torch.zeros(1)
        return together(patches, places, [cells_of(grid, places[0].device)], grid, times)

    def _weights(self, item: Media, steps: int) -> list[float]:
        """The patches of a token of each step."""
        last = len(_frames(item)) - self.clip.time * (steps - 1) if isinstance(item, Video) else 1
        frames = [self.clip.time if isinstance(item, Video) else 1] * (steps - 1) + [last]
        return [float(self.picture.merge**2 * many) for many in frames]

    def _grid(self, index: int, item: Media) -> tuple[int, int, int]:
        if not _frames(item).numel():
            raise InputError("has no pixels; give at least one frame of at least 1x1", item=item.source, index=index)
        try:
            return self.grid(item.size, len(_frames(item)))
        except InputError as error:
            raise InputError(error.message, item=item.source, index=index) from error

    def _patches(self, item: Media, start: int, stop: int, grid: tuple[int, int]) -> Float[Tensor, "b n c"]:
        """The patches of these steps, in reading order; each is its colours, then its frames, then its rows and columns of pixels."""
        fit, frames = self.clip if len(_frames(item)) > 1 else self.picture, _frames(item)
        pixels = fit(frames[start * fit.time : stop * fit.time].to(self.tower.patch.weight.device), grid)
        steps = _filled(pixels, fit.time).unflatten(0, (-1, fit.time))
        cut = steps.unflatten(4, (grid[1], fit.patch)).unflatten(3, (grid[0], fit.patch))
        # [b time 3 rows patch columns patch] by patch
        patches: Tensor = cut.permute(0, 3, 5, 2, 1, 4, 6).flatten(3).flatten(1, 2)
        return patches

    def _tokens(self, item: Media, seen: Sequence[TowerOutput], grid: tuple[int, int, int]) -> VisualTokens:
        features, saliency, keys = (
            torch.cat(parts).flatten(0, 1) for parts in zip(*((o.features, o.saliency, o.keys) for o in seen), strict=True)
        )
        device = features.device
        times = self.moments(item.times) if isinstance(item, Video) else torch.zeros(1)
        weight = torch.tensor(self._weights(item, grid[0]), device=device)
        return VisualTokens(
            features=features,
            positions=cells_of(grid, device),
            weight=weight.repeat_interleave(grid[1] * grid[2]),
            grid=grid,
            times=times.to(device),
            saliency=saliency,
            keys=keys,
            deep=tuple(torch.cat(layer).flatten(0, 1) for layer in zip(*(o.deep for o in seen), strict=True)),
        )


def _frames(item: Media) -> UInt8[Tensor, "f 3 h w"]:
    return item.frames if isinstance(item, Video) else item.pixels[None]


def _filled(x: Tensor, time: int) -> Tensor:
    """Whole steps, the last frame repeated where some are missing."""
    missing = -len(x) % time
    return torch.cat([x, x[-1:].expand(missing, *x.shape[1:])]) if missing else x


def _batches(steps: dict[int, int], most: int) -> Iterator[list[Step]]:
    """The steps of inputs, from and to, by the input's number, `most` at a time; a batch may run over several inputs."""
    batch, room = list[Step](), most
    for i, count in steps.items():
        start = 0
        while start < count:
            stop = min(count, start + room)
            batch.append((i, start, stop))
            room, start = room - (stop - start), stop
            if not room:
                yield batch
                batch, room = [], most
    if batch:
        yield batch


def _parts(seen: TowerOutput, sizes: Sequence[int]) -> list[TowerOutput]:
    """What was seen of each of the inputs in a batch."""
    features, saliency, keys = seen.features.split(sizes), seen.saliency.split(sizes), seen.keys.split(sizes)
    deep = [layer.split(sizes) for layer in seen.deep]
    return [TowerOutput(features[i], tuple(layer[i] for layer in deep), saliency[i], keys[i]) for i in range(len(sizes))]
