"""From pictures and clips to visual tokens, whatever the backbone: group by grid, see in batches, pool clips, give back in order.

Letters: f frames, b frames in one batch, n tokens of a frame, m of an input after pooling, d width of a token, h heads, e width of a key.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from mmsdk.errors import BudgetError, InputError, ModelError
from mmsdk.vision.cells import cells_of
from mmsdk.vision.merged import Merged, together
from mmsdk.vision.pooling import Pool, patches, pooled_grid
from mmsdk.vision.prune import Pruner, Pruning
from mmsdk.vision.shorten import WHOLE, Area, Groups, Shortened, Shortener, Shortening
from mmsdk.vision.types import Media, Video, VisualTokens
from mmsdk.vision.vit import ViT

__all__ = ["Backbone", "Encoder", "Fit", "Sight"]

Plan = TypeVar("Plan", bound=Shortening | Pruning)


@runtime_checkable
class Fit(Protocol):
    """What brings pixels into the shape and scale an encoder takes, such as `mmsdk.vision.preprocess.Preprocess`."""

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of patches for an input of (height, width) pixels."""
        ...

    def __call__(self, pixels: UInt8[Tensor, "f 3 h w"]) -> Float[Tensor, "f 3 y x"]:
        """Resized and normalised pixels."""
        ...


@dataclass(frozen=True, slots=True)
class Sight:
    """What a backbone makes of a batch of frames of one grid, in rows of the grid or as `groups` says; `saliency` is float32."""

    features: Float[Tensor, "b n d"]
    saliency: Float[Tensor, "b n"]
    keys: Float[Tensor, "b n e"]
    groups: Groups

    @staticmethod
    def of(features: Float[Tensor, "b n d"], attention: Float[Tensor, "b h n"], keys: Float[Tensor, "b h n e"], groups: Groups) -> "Sight":
        """From the taps of one layer: saliency is the mean of the heads, keys stand side by side."""
        return Sight(features, attention.mean(dim=1), keys.transpose(1, 2).flatten(2), groups)


@runtime_checkable
class Backbone(Protocol):
    """A vision transformer as one family reads it: which of its states are the features, what scores a patch."""

    @property
    def vit(self) -> ViT: ...

    @property
    def width(self) -> int:
        """d, the width of the features."""
        ...

    def __call__(self, pixels: Float[Tensor, "b 3 y x"], shortening: Shortening | Pruning = WHOLE) -> Sight:
        """What it makes of normalised frames, in the dtype and on the device of the transformer."""
        ...


@dataclass(frozen=True, slots=True)
class Encoder:
    """A `VisionEncoder`: pixels brought into shape by `preprocess`, seen by `backbone`, at most `batch` frames at one time.

    Clips are pooled by `frame_pool` x `frame_pool` patches of `time_pool` frames, into ceil(frames / time_pool) steps whose time is the
    mean of their frames'; cells at a ragged edge, and the last step, hold fewer. A clip of one frame is a picture and is not pooled.
    """

    backbone: Backbone
    preprocess: Fit
    frame_pool: int = 2
    time_pool: int = 1
    batch: int = 8

    def __post_init__(self) -> None:
        if min(self.frame_pool, self.time_pool, self.batch) < 1:
            raise ModelError(f"frame_pool, time_pool and batch are at least 1, not {self.frame_pool}, {self.time_pool} and {self.batch}")

    @property
    def width(self) -> int:
        """d, the width of the features."""
        return self.backbone.width

    def count(self, size: tuple[int, int], frames: int = 1) -> int:
        """How many tokens an input of (height, width) pixels gives, without encoding it; a clip of one frame counts as a picture."""
        steps, rows, columns = pooled_grid((frames, *self.preprocess.grid(size)), self._pool(frames))
        return steps * rows * columns

    @torch.no_grad()
    def __call__(self, media: Sequence[Media]) -> list[VisualTokens]:
        """The tokens of each input, in input order. Raises InputError, with its place, for an input without pixels."""
        _check(media)
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, item in enumerate(media):
            groups[self.preprocess.grid(item.size)].append(i)
        found: dict[int, VisualTokens] = {}
        for grid, members in groups.items():
            inputs = [_frames(media[i]) for i in members]
            pools = [[Pool(grid, self._pool(len(frames))) for _ in range(3)] for frames in inputs]
            for counts, sight in self._sights(inputs):
                columns = (x.split(list(counts.values())) for x in (sight.features, sight.saliency[..., None], sight.keys))
                for number, *parts in zip(counts, *columns, strict=True):
                    for pool, part in zip(pools[number], parts, strict=True):
                        pool.take(part)
            for i, frames, pooled in zip(members, inputs, pools, strict=True):
                found[i] = _tokens(media[i], pooled, (len(frames), *grid), self._pool(len(frames)))
        return [found[i] for i in range(len(media))]

    def plan(self, size: tuple[int, int], frames: int, by: Shortener, count: int) -> list[Shortening]:
        """How each frame of an input comes to its part of `count` tokens; the parts differ by one at most.

        Raises BudgetError where a frame would have no token, or the method cannot get there.
        """
        rows, columns = self.preprocess.grid(size)
        parts, depth = _parts(count, frames), self.backbone.vit.config.layers
        plans = {part: Shortening(by, by.plan(rows * columns, part, depth)) for part in set(parts)}
        return [plans[part] for part in parts]

    def prunings(self, size: tuple[int, int], frames: int, by: Pruner, count: int, exact: bool) -> list[Pruning]:
        """How each frame of an input comes to its part of `count` tokens, or, not exact, to no more; the parts differ by one at most.

        Raises BudgetError where a frame would have no token.
        """
        return [Pruning(by, part, exact) for part in _parts(count, frames)]

    def shortened(self, media: Sequence[Media], plans: Sequence[Sequence[Shortening]]) -> list[Shortened]:
        """The tokens of each input, in input order, by one plan a frame; frames of equal grids and plans run together.

        Raises InputError, with its place, for an input without pixels.
        """
        return self._inside(media, plans, _merged)

    def pruned(self, media: Sequence[Media], plans: Sequence[Sequence[Pruning]]) -> list[Shortened]:
        """The same where frames are pruned."""
        return self._inside(media, plans, _pruned)

    @torch.no_grad()
    def _inside(
        self, media: Sequence[Media], plans: Sequence[Sequence[Plan]], left: Callable[[Sight, tuple[int, int]], list[Merged]]
    ) -> list[Shortened]:
        _check(media)
        runs: dict[tuple[tuple[int, int], Plan], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for i, item in enumerate(media):
            for frame, plan in enumerate(plans[i]):
                runs[self.preprocess.grid(item.size), plan][i].append(frame)
        found: dict[tuple[int, int], Merged] = {}
        for (grid, plan), members in runs.items():
            sights = self._sights([_frames(media[i])[frames] for i, frames in members.items()], plan)
            seen = [view for _, sight in sights for view in left(sight, grid)]
            found |= dict(zip(((i, frame) for i, frames in members.items() for frame in frames), seen, strict=True))
        grids = [(len(plans[i]), *self.preprocess.grid(item.size)) for i, item in enumerate(media)]
        return [_shortened(item, [found[i, frame] for frame in range(grids[i][0])], grids[i]) for i, item in enumerate(media)]

    def _pool(self, frames: int) -> tuple[int, int, int]:
        return (self.time_pool, self.frame_pool, self.frame_pool) if frames > 1 else (1, 1, 1)

    def _sights(
        self, inputs: Sequence[UInt8[Tensor, "_ 3 _ _"]], shortening: Shortening | Pruning = WHOLE
    ) -> Iterator[tuple[dict[int, int], Sight]]:
        """Frames of inputs that share a grid, whatever their sizes in pixels: a batch at a time, with the frames of each input in it."""
        like = self.backbone.vit.position
        # normalised pixels take four times what bytes do, so that no more than one batch of them exists at a time
        for parts in _batches(inputs, self.batch):
            pixels = torch.cat([self.preprocess(part.to(like.device)).to(like.dtype) for part in parts.values()])
            yield {number: len(part) for number, part in parts.items()}, self.backbone(pixels, shortening)


def _parts(count: int, frames: int) -> list[int]:
    if count < frames:
        raise BudgetError(f"each of {frames} frames is shortened by itself, and {count} tokens leave some of them none")
    return [(frame + 1) * count // frames - frame * count // frames for frame in range(frames)]


def _merged(sight: Sight, grid: tuple[int, int]) -> list[Merged]:
    """Shortened frames of one grid."""
    groups = sight.groups.tokens(Area(0, grid[0], 0, grid[1]), grid)
    return Merged.of(sight.features, sight.saliency, sight.keys, groups, grid[1])


def _pruned(sight: Sight, grid: tuple[int, int]) -> list[Merged]:
    """The same of pruned ones."""
    return Merged.pruned(sight.features, sight.saliency, sight.keys, sight.groups, grid[1])


def _shortened(item: Media, frames: Sequence[Merged], grid: tuple[int, int, int]) -> Shortened:
    places = [F.pad(frame.places, (1, 0), value=t) for t, frame in enumerate(frames)]
    times = item.times if isinstance(item, Video) else torch.zeros(1)
    return together(frames, places, [cells_of(grid, frames[0].features.device)], grid, times)


def _check(media: Sequence[Media]) -> None:
    for i, item in enumerate(media):
        if not _frames(item).numel():
            raise InputError("has no pixels; give at least one frame of at least 1x1", item=item.source, index=i)


def _frames(item: Media) -> UInt8[Tensor, "f 3 h w"]:
    return item.frames if isinstance(item, Video) else item.pixels[None]


def _batches(inputs: Sequence[UInt8[Tensor, "_ 3 _ _"]], batch: int) -> Iterator[dict[int, UInt8[Tensor, "_ 3 _ _"]]]:
    """The frames of all inputs in order, by input, `batch` at a time and in the end what is left; a batch may run over several inputs."""
    parts: dict[int, Tensor] = {}
    room = batch
    for number, frames in enumerate(inputs):
        while len(frames):
            parts[number], frames = frames[:room], frames[room:]
            room -= len(parts[number])
            if not room:
                yield parts
                parts, room = {}, batch
    if parts:
        yield parts


def _tokens(item: Media, pooled: Sequence[Pool], full: tuple[int, int, int], pool: tuple[int, int, int]) -> VisualTokens:
    """From the features, the saliency and the keys of an input's frames."""
    features, saliency, keys = (column.tokens() for column in pooled)
    times = item.times if isinstance(item, Video) else torch.zeros(1)
    return VisualTokens(
        features=features,
        positions=cells_of(pooled_grid(full, pool), features.device),
        weight=patches(full, pool, features.device),
        grid=pooled_grid(full, pool),
        times=F.avg_pool1d(times[None], pool[0], ceil_mode=True, count_include_pad=False)[0].to(features.device),
        saliency=saliency[:, 0],
        keys=keys,
    )
