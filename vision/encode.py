"""From pictures and clips to visual tokens, whatever the encoder: group by grid, see in batches, pool clips, give back in order.

Letters: f frames, b frames in one batch, n tokens of a frame, d width of a token, e width of its key.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vision.types import Media, Video, VisualTokens

__all__ = ["Fit", "Sight", "encode", "pooled_grid"]


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
    """What an encoder makes of a batch of frames of one grid, in rows of the grid; `saliency` is float32."""

    features: Float[Tensor, "b n d"]
    saliency: Float[Tensor, "b n"]
    keys: Float[Tensor, "b n e"]


def encode(
    media: Sequence[Media],
    fit: Fit,
    see: Callable[[Float[Tensor, "b 3 y x"]], Sight],
    *,
    frame_pool: int,
    batch: int,
    like: Tensor,
) -> list[VisualTokens]:
    """One `VisualTokens` per input, in input order; frames of equal grids share batches of at most `batch` frames.

    Clips are pooled by `frame_pool` x `frame_pool` patches of each frame; cells at a ragged edge hold fewer. A clip of one frame is a
    picture. `see` takes and gives the dtype and device of `like`, a parameter of the model.
    Raises InputError, with its place, for an input without pixels.
    """
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, item in enumerate(media):
        if not _frames(item).numel():
            raise InputError("has no pixels; give at least one frame of at least 1x1", item=item.source, index=i)
        groups[fit.grid(item.size)].append(i)
    found: dict[int, VisualTokens] = {}
    for grid, members in groups.items():
        parts = [part for i in members for part in _frames(media[i]).split(batch)]
        pixels = torch.cat([fit(part.to(like.device)).to(like.dtype) for part in parts])
        sights = [see(chunk) for chunk in pixels.split(batch)]
        counts = [len(_frames(media[i])) for i in members]
        columns = [torch.cat(column).split(counts) for column in zip(*((s.features, s.saliency, s.keys) for s in sights), strict=True)]
        for i, features, saliency, keys in zip(members, *columns, strict=True):
            pool = frame_pool if len(features) > 1 else 1
            found[i] = _tokens(media[i], Sight(features, saliency, keys), grid, pool)
    return [found[i] for i in range(len(media))]


def pooled_grid(grid: tuple[int, int], frames: int, frame_pool: int) -> tuple[int, int, int]:
    """(t, h, w) of the tokens of an input: a clip's frames are pooled, a single frame is not."""
    pool = frame_pool if frames > 1 else 1
    return frames, -(-grid[0] // pool), -(-grid[1] // pool)


def _frames(item: Media) -> UInt8[Tensor, "f 3 h w"]:
    return item.frames if isinstance(item, Video) else item.pixels[None]


def _tokens(item: Media, sight: Sight, grid: tuple[int, int], pool: int) -> VisualTokens:
    frames = len(sight.features)
    shape = pooled_grid(grid, frames, pool)
    features, keys, saliency = (_pool(x, grid, pool) for x in (sight.features, sight.keys, sight.saliency[..., None]))
    times = item.times if isinstance(item, Video) else torch.zeros(1)
    return VisualTokens(
        features=features,
        positions=_positions(shape, features.device),
        weight=_weight(grid, frames, pool, features.device),
        grid=shape,
        times=times.to(features.device),
        saliency=saliency[:, 0],
        keys=keys,
    )


def _pool(x: Float[Tensor, "f n d"], grid: tuple[int, int], pool: int) -> Float[Tensor, "m d"]:
    if pool == 1:
        return x.flatten(0, 1)
    plane = x.transpose(1, 2).unflatten(2, grid).float()
    return F.avg_pool2d(plane, pool, ceil_mode=True, count_include_pad=False).flatten(2).transpose(1, 2).flatten(0, 1).to(x.dtype)


def _positions(shape: tuple[int, int, int], device: torch.device) -> Int[Tensor, "m 3"]:
    axes = [torch.arange(size, device=device) for size in shape]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)


def _weight(grid: tuple[int, int], frames: int, pool: int, device: torch.device) -> Float[Tensor, " m"]:
    ones = torch.ones(1, 1, *grid, device=device)
    sums = F.avg_pool2d(ones, pool, ceil_mode=True, count_include_pad=True, divisor_override=1)
    return sums.flatten().repeat(frames)
