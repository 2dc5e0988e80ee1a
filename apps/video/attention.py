"""One sparse attention beside dense on the same cores, over made latents: smooth fields and places, each head another mixture."""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from mmsdk import plugins
from mmsdk.apps.video.rows import Row, psnr, rel_l2, row, seconds
from mmsdk.diffusion.attention.attend import attend
from mmsdk.diffusion.attention.types import Blocks, Everything, Grid, Place, Selection, Selector
from mmsdk.errors import PluginError

__all__ = ["METHODS", "attention"]

METHODS = "mmsdk.diffusion.attention.methods"


def attention(grid: Grid, heads: int, head_dim: int, dtype: torch.dtype, methods: Sequence[str], repeats: int, seed: int) -> Iterator[Row]:
    """Rows of methods by name; "random-64" and "random-128" read a fifth of the blocks of that size, drawn.

    Seconds of one attention with its choice made, `choosing_seconds` of the choice, `speedup` of the first over dense attention and
    `speedup_all` of both; error relative to dense.
    """
    query, keys, values = (x.to(dtype) for x in _latents(grid, heads, head_dim, seed))
    projection = torch.randn(heads, heads * head_dim, head_dim, generator=_generator(seed))
    place = Place(grid, step=25, steps=50, layer=15, layers=30, projection=projection)
    dense = F.scaled_dot_product_attention(query, keys, values)
    for name in tqdm(methods, desc="attention", unit="method", mininterval=2):
        started = time.perf_counter()
        choice = _selector(name, seed)(query, keys, values, place)
        choosing = time.perf_counter() - started
        if isinstance(choice, Everything):
            continue
        # dense and sparse in turn, so that what else the machine does meets both
        runs = (partial(F.scaled_dot_product_attention, query, keys, values), partial(attend, query, keys, values, choice))
        pairs = [[seconds(run) for run in runs] for _ in range(repeats)]
        whole, sparse = (statistics.median(side) for side in zip(*pairs, strict=True))
        out = attend(query, keys, values, choice)
        yield row("attention", name, grid.tokens, 1 - choice.density()) | {
            "speedup": whole / sparse,
            "seconds": sparse,
            "rel_l2": rel_l2(out, dense),
            "psnr": psnr(out, dense),
            "dtype": str(dtype).removeprefix("torch."),
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
