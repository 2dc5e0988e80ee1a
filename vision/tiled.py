"""An encoder that looks at an input in several views of one size: tiles of a large picture, an overview, the frames of a clip.

    encoder = Tiled(backbone, views)

What the views of an input are, and how their tokens come together again, is the family's (`Views`); here the views of all inputs go
through the backbone together, a batch at a time.

Letters: v views of an input, n patches of a view, m tokens of an input, d width of a patch, e width of a key.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vision.encode import Backbone
from mmsdk.vision.merged import Merged, planned
from mmsdk.vision.shorten import Area, Shortened, Shortener, Shortening
from mmsdk.vision.types import Image, Media, Video, VisualTokens

__all__ = ["Tiled", "Viewed", "Views"]


@dataclass(frozen=True, slots=True)
class Viewed:
    """What a backbone makes of the views of one input: `saliency` is float32."""

    features: Float[Tensor, "v n d"]
    saliency: Float[Tensor, "v n"]
    keys: Float[Tensor, "v n e"]


@runtime_checkable
class Views(Protocol):
    """How a family looks at an input."""

    @property
    def width(self) -> int:
        """The width of the tokens that `tokens` gives."""
        ...

    def count(self, size: tuple[int, int], frames: int) -> int:
        """How many tokens a picture of (height, width) pixels (`frames` 0) or a clip gives."""
        ...

    def cut(self, item: Media) -> Float[Tensor, "v 3 y x"]:
        """The views of an input, normalised, all of one size. Raises InputError for what the family cannot look at."""
        ...

    def tokens(self, item: Media, viewed: Viewed) -> VisualTokens:
        """The tokens of an input from what was seen in its views."""
        ...

    def areas(self, size: tuple[int, int], frames: int) -> list[Area]:
        """Of each view of a picture of (height, width) pixels (`frames` 0) or a clip, the patches that tokens are made of."""
        ...

    def merged(self, item: Media, views: Sequence[Merged]) -> Shortened:
        """The tokens of an input from views that were shortened; features of a square of patches stand side by side."""
        ...


@dataclass(frozen=True, slots=True)
class Tiled:
    """A `ShorteningEncoder` over views, at most `batch` of them at one time."""

    backbone: Backbone
    views: Views
    batch: int = 8

    @property
    def width(self) -> int:
        """d, the width of the features."""
        return self.views.width

    def count(self, size: tuple[int, int], frames: int = 1) -> int:
        """How many tokens an input of (height, width) pixels gives, without encoding it; a clip of one frame counts as a picture."""
        return self.views.count(size, frames if frames > 1 else 0)

    @torch.no_grad()
    def __call__(self, media: Sequence[Media]) -> list[VisualTokens]:
        """The tokens of each input, in input order. Raises InputError, with its place, for one that cannot be seen."""
        like = self.backbone.vit.position
        media = [_still(item) for item in media]
        cut = [self._cut(place, item).to(like.device, like.dtype) for place, item in enumerate(media)]
        if not cut:
            return []
        sights = [self.backbone(part) for part in torch.cat(cut).split(self.batch)]
        features, saliency, keys = (torch.cat(column) for column in zip(*((s.features, s.saliency, s.keys) for s in sights), strict=True))
        counts = [len(views) for views in cut]
        seen = (Viewed(*parts) for parts in zip(features.split(counts), saliency.split(counts), keys.split(counts), strict=True))
        return [self.views.tokens(item, viewed) for item, viewed in zip(media, seen, strict=True)]

    def plan(self, size: tuple[int, int], frames: int, by: Shortener, count: int) -> list[Shortening]:
        """How each view of an input comes to its part of `count` tokens, like its part of all.

        Raises BudgetError where a view would have no token, or the method cannot get there.
        """
        areas = self.views.areas(size, frames if frames > 1 else 0)
        return planned(areas, by, count, self.backbone.vit.config.layers)

    @torch.no_grad()
    def shortened(self, media: Sequence[Media], plans: Sequence[Sequence[Shortening]]) -> list[Shortened]:
        """The tokens of each input, in input order, by one plan a view; views of equal plans run together.

        Raises InputError, with its place, for an input that cannot be seen.
        """
        like = self.backbone.vit.position
        media = [_still(item) for item in media]
        runs: dict[Shortening, list[tuple[int, int]]] = defaultdict(list)
        for place, views in enumerate(plans):
            for number, plan in enumerate(views):
                runs[plan].append((place, number))
        cut = [self._cut(place, item).to(like.device, like.dtype) for place, item in enumerate(media)]
        found: dict[tuple[int, int], Merged] = {}
        for plan, members in runs.items():
            pixels = torch.stack([cut[place][number] for place, number in members])
            seen = [one for part in pixels.split(self.batch) for one in self._merged(part, plan)]
            found |= dict(zip(members, seen, strict=True))
        return [self.views.merged(item, [found[place, i] for i in range(len(plans[place]))]) for place, item in enumerate(media)]

    def _merged(self, pixels: Float[Tensor, "b 3 y x"], plan: Shortening) -> list[Merged]:
        """What is left of views, the patches of a token's square side by side in its features."""
        (area,), patch = plan.area, self.backbone.vit.config.patch
        sight, view = self.backbone(pixels, plan), (pixels.shape[2] // patch, pixels.shape[3] // patch)
        groups, each = sight.groups.tokens(area, view), sight.groups.each
        saliency, keys = (x.unflatten(1, (-1, each)).mean(dim=2) for x in (sight.saliency, sight.keys))
        return Merged.of(sight.features.unflatten(1, (-1, each)).flatten(2), saliency, keys, groups, area.grid[1])

    def _cut(self, place: int, item: Media) -> Float[Tensor, "v 3 y x"]:
        pixels = item.frames if isinstance(item, Video) else item.pixels
        if not pixels.numel():
            raise InputError("has no pixels; give at least one frame of at least 1x1", item=item.source, index=place)
        try:
            return self.views.cut(item)
        except InputError as error:
            raise error.at(place) from error


def _still(item: Media) -> Media:
    """A clip of one frame as the picture that it is."""
    one = isinstance(item, Video) and len(item.frames) == 1
    return Image(item.frames[0], item.source, item.notes) if one and isinstance(item, Video) else item
