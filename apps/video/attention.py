"""Sparse attentions beside dense on the same cores, over made latents: smooth fields and places, each head another mixture."""

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from mmsdk import plugins
from mmsdk.apps.video.rows import Row, psnr, rel_l2, row, seconds
from mmsdk.diffusion.attention.attend import attend
from mmsdk.diffusion.attention.types import Blocks, Everything, Grid, Place, Selection, Selector
from mmsdk.errors import PluginError

__all__ = ["METHODS", "Latents", "attended", "settings"]

METHODS = "mmsdk.diffusion.attention.methods"

# As published, and with more left out; what is not here is measured as it is. Windows of 6 x 8 x 8 tokens leave little out of short clips.
_SETTINGS = {
    "draft": ("draft:sparsity=0.8", "draft"),
    "nabla": ("nabla", "nabla:mass=0.7"),
    "radial": ("radial", "radial:decay_factor=0.5"),
    "ress": ("ress", "ress:sparsity=0.85"),
    "sparge": ("sparge", "sparge:topk=0.2"),
    "sta": ("sta", "sta:tile_frames=4,tile_height=4,tile_width=4"),
    "svg": ("svg", "svg:share=0.2"),
    "svg2": ("svg2", "svg2:mass=0.7"),
    "vmoba": ("vmoba", "vmoba:threshold=0.1"),
    "vsa": ("vsa:sparsity=0.8", "vsa"),
    "xattention": ("xattention", "xattention:threshold=0.7"),
}


def settings(methods: str) -> list[str]:
    """What is measured of the methods named, joined by "+"; of "all" two settings of each, and blocks that are drawn."""
    if methods != "all":
        return methods.split("+")
    known, drawn = plugins.available(METHODS), ("random-64", "random-128")
    return [*drawn, *(f"{name} bfloat16" for name in drawn), *(setting for name in known for setting in _SETTINGS.get(name, (name,)))]


@dataclass(frozen=True)
class Latents:
    """Queries, keys and values of a grid, made once, in the middle of a generation."""

    grid: Grid
    heads: int
    head_dim: int
    dtype: torch.dtype
    seed: int

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each [1, heads, tokens, head_dim]."""
        query, keys, values = (x.to(self.dtype) for x in _latents(self.grid, self.heads, self.head_dim, self.seed))
        return query, keys, values

    @property
    def place(self) -> Place:
        """Past the steps and layers that methods leave dense."""
        projection = torch.randn(self.heads, self.heads * self.head_dim, self.head_dim, generator=_generator(self.seed))
        return Place(self.grid, step=25, steps=50, layer=15, layers=30, projection=projection)


def attended(latents: Latents, name: str, repeats: int) -> Iterator[Row]:
    """The row of a method by name; "random-64" and "random-128" read a fifth of the blocks of that size, drawn. A dtype may stand behind.

    Seconds of one attention with its choice made, `choosing_seconds` of the choice, `speedup` of the first over dense attention and
    `speedup_all` of both; error relative to dense.
    """
    name, _, told = name.partition(" ")
    latents = replace(latents, dtype=getattr(torch, told)) if told else latents
    query, keys, values = latents.tensors
    dense, selector = F.scaled_dot_product_attention(query, keys, values), _selector(name, latents.seed)
    place, started = latents.place, time.perf_counter()
    choice = selector(query, keys, values, place)
    choosing = time.perf_counter() - started
    if isinstance(choice, Everything):
        return
    # dense and sparse in turn, so that what else the machine does meets both
    runs = (partial(F.scaled_dot_product_attention, query, keys, values), partial(attend, query, keys, values, choice))
    pairs = [[seconds(run) for run in runs] for _ in range(repeats)]
    whole, sparse = (statistics.median(side) for side in zip(*pairs, strict=True))
    out = attend(query, keys, values, choice)
    yield row("attention", name, latents.grid.tokens, 1 - choice.density()) | {
        "speedup": whole / sparse,
        "seconds": sparse,
        "rel_l2": rel_l2(out, dense),
        "psnr": psnr(out, dense),
        "dtype": str(latents.dtype).removeprefix("torch."),
        "dense_seconds": whole,
        "choosing_seconds": choosing,
        "speedup_all": whole / (sparse + choosing),
    }


def _selector(name: str, seed: int) -> Selector:
    if name.startswith("random-"):
        return _Random(int(name.removeprefix("random-")), seed)
    built = plugins.load(METHODS, name)
    if not isinstance(built, Selector):
        raise PluginError(f"{name!r} in {METHODS} cannot be called")
    return built


@dataclass(frozen=True, slots=True)
class _Random:
    """A fifth of the blocks, drawn for every row of every head: the arithmetic of 80 % sparsity with nothing chosen."""

    size: int
    seed: int

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, place: Place) -> Selection:
        blocks = Blocks(self.size, query.shape[2])
        marks = torch.rand(*query.shape[:2], blocks.count, blocks.count, generator=_generator(self.seed))
        kept = marks.argsort(-1)[..., : max(1, blocks.count // 5)]
        return Selection(torch.zeros_like(marks, dtype=torch.bool).scatter_(3, kept, True), blocks, blocks)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _latents(grid: Grid, heads: int, d: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values: a smooth field of content, and waves over the places, in proportions that differ by head."""
    draw = _generator(seed)
    sides = (grid.frames, grid.height, grid.width)
    coarse = torch.randn(1, d, *(max(2, side // 4) for side in sides), generator=draw)
    content = F.interpolate(coarse, size=sides, mode="trilinear", align_corners=True)[0].flatten(1).T
    axes = torch.meshgrid(*(torch.arange(side) / side for side in sides), indexing="ij")
    angles = torch.stack([axis.flatten() for axis in axes], 1) @ (2 * math.pi * torch.randn(3, d // 2, generator=draw) * 2)
    places = torch.cat((angles.cos(), angles.sin()), 1)
    parts = []
    for head in range(heads):
        share = head / max(heads - 1, 1)
        mixed = share * content + (1 - share) * 1.5 * places
        parts.append(torch.stack((mixed, mixed + torch.randn(mixed.shape, generator=draw) / 4, content)))
    query, keys, values = (F.pad(x, (0, d - x.shape[2]))[None] for x in torch.stack(parts, 1))
    return query.contiguous(), keys.contiguous(), values.contiguous()
