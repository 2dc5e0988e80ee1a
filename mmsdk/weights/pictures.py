"""A checkpoint's settings for pictures as values of `mmsdk.vision.pixels`: they are looked up, never run."""

from typing import get_args

from mmsdk.errors import ModelError
from mmsdk.vision.pixels import Filter, Levels
from mmsdk.vision.prepare import Prepare
from mmsdk.weights.fields import Fields

__all__ = ["CLIP", "HALVES", "filter_of", "levels_of", "prepare_of", "square_of"]

CLIP = Levels(1 / 255, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""The scale of CLIP (arXiv 2103.00020), which a checkpoint has that says nothing else."""

HALVES = Levels(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""The scale of SigLIP (arXiv 2303.15343): from -1 to 1."""


def levels_of(fields: Fields, default: Levels) -> Levels:
    """How bytes become numbers. Raises ModelError for settings that are none."""
    factor = fields.real("rescale_factor", default.factor) if fields.flag("do_rescale", default=True) else 1.0
    if not fields.flag("do_normalize", default=True):
        return Levels(factor)
    mean, std = fields.reals("image_mean", default.mean), fields.reals("image_std", default.std)
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise ModelError(f"{fields.where}: image_mean {mean} and image_std {std} must be of three channels, and std above 0")
    return Levels(factor, mean, std)


def filter_of(fields: Fields, default: Filter) -> Filter:
    """The filter of resizing, which settings give by Pillow's number. Raises ModelError for one that there is not."""
    filters: tuple[Filter, ...] = get_args(Filter)
    number = fields.whole("resample", filters.index(default))
    if not 0 <= number < len(filters):
        raise fields.wrong("resample", f"the number of a filter, from 0 to {len(filters) - 1}")
    return filters[number]


def square_of(fields: Fields, name: str, default: int) -> tuple[int, int]:
    """(height, width) where settings give both, or one side for both. Raises ModelError where there are none above 0."""
    group = fields.group(name)
    side = group.whole("shortest_edge", default)
    size = group.whole("height", side), group.whole("width", side)
    if min(size) < 1:
        raise fields.wrong(name, "a size of at least one pixel a side")
    return size


def prepare_of(fields: Fields, patch: int, image: int, levels: Levels = CLIP, by: Filter = "bicubic") -> Prepare:
    """How pictures are prepared for a tower of patches, `image` pixels a side, to `levels` and `by` a filter where nothing is said.

    Raises ModelError for settings that are none, and for a size that patches do not divide.
    """
    if not fields.flag("do_resize", default=True):
        raise fields.wrong("do_resize", "true: a vision tower takes pictures of one size")
    resize, cut = fields.group("size"), fields.flag("do_center_crop", default=fields.has("crop_size"))
    size = square_of(fields, "crop_size" if cut else "size", image)
    short = 0 if resize.has("height") else resize.whole("shortest_edge", image) if cut else 0
    if size[0] % patch or size[1] % patch:
        raise ModelError(f"{fields.where}: pictures of {size[1]}x{size[0]} do not divide into patches of {patch}")
    if not cut or short or square_of(fields, "size", image) == size:
        square = fields.flag("do_pad", default=False)
        return Prepare(patch, size, short, filter_of(fields, by), levels_of(fields, levels), square)
    raise fields.wrong("crop_size", f"what size {square_of(fields, 'size', image)} resizes to, where that is no shorter side")
