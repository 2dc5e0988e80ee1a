"""Video diffusion: sparse attention beside dense on the same cores, and what the order of rows does to a model of a GPU's cache."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from mmsdk import plugins
from mmsdk.apps.console import Cell
from mmsdk.diffusion.attention.attend import attend
from mmsdk.diffusion.attention.cache_model import Machine, traffic
from mmsdk.diffusion.attention.types import Blocks, Everything, Grid, Place, Selection, Selector
from mmsdk.diffusion.attention.wave_align import WaveAlign
from mmsdk.errors import InputError, PluginError

__all__ = ["Video"]

METHODS = "mmsdk.diffusion.attention.methods"

# A row of every kind has all of these; what a kind does not measure is None.
_COLUMNS = ("kind", "method", "sparsity", "tokens", "speedup", "seconds", "rel_l2", "psnr", "agreement", "l2_hit", "l2_hit_unordered")


@dataclass(frozen=True, slots=True)
class Video:
    """Attention over made latents of frames x height x width tokens: smooth fields and places, of which each head looks at another mixture.

    `methods` are all, or names joined by "+"; "random-64" and "random-128" read a fifth of the blocks of that size, drawn. `kind` leaves
    out the other one; the cache model runs masks of `wave_tokens` tokens in blocks of 128 with the sizes of an H100.
    """

    frames: int = 16
    height: int = 32
    width: int = 32
    heads: int = 2
    head_dim: int = 64
    dtype: Literal["float32", "bfloat16"] = "float32"
    methods: str = "all"
    kind: Literal["all", "attention", "wavealign"] = "all"
    repeats: int = 3
    wave_tokens: int = 118272
    wave_heads: int = 4
    seed: int = 0

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {kind, method, sparsity, tokens, speedup, seconds, rel_l2, psnr, agreement, l2_hit, l2_hit_unordered, ...}.

        Attention: seconds of one attention with its choice made, `choosing_seconds` of the choice, `speedup` of the first over dense
        attention and `speedup_all` of both; error relative to dense. Wavealign: seconds in which the rows were put in order, and the
        cache's hit ratios.
        """
        for name in ("heads", "head_dim", "repeats", "wave_tokens", "wave_heads"):
            if getattr(self, name) < 1:
                raise InputError(f"it is {getattr(self, name)}, it must be at least 1", item=name)
        rows: list[dict[str, Cell]] = []
        with torch.no_grad():
            rows += [] if self.kind == "wavealign" else self._attention()
            rows += [] if self.kind == "attention" else list(self._wavealign())
        return rows

    def _attention(self) -> list[dict[str, Cell]]:
        grid = Grid(self.frames, self.height, self.width)
        query, keys, values = (x.to(getattr(torch, self.dtype)) for x in _latents(grid, self.heads, self.head_dim, self.seed))
        names = ["random-64", "random-128", *plugins.available(METHODS)] if self.methods == "all" else self.methods.split("+")
        projection = torch.randn(self.heads, self.heads * self.head_dim, self.head_dim, generator=_generator(self.seed))
        place = Place(grid, step=25, steps=50, layer=15, layers=30, projection=projection)
        dense = F.scaled_dot_product_attention(query, keys, values)
        rows = []
        for name in tqdm(names, desc="attention", unit="method", mininterval=2):
            selector = self._selector(name)
            started = time.perf_counter()
            choice = selector(query, keys, values, place)
            choosing = time.perf_counter() - started
            if isinstance(choice, Everything):
                continue
            # dense and sparse in turn, so that what else the machine does meets both
            pairs = [
                (
                    _seconds(partial(F.scaled_dot_product_attention, query, keys, values)),
                    _seconds(partial(attend, query, keys, values, choice)),
                )
                for _ in range(self.repeats)
            ]
            whole, seconds = (statistics.median(side) for side in zip(*pairs, strict=True))
            out = attend(query, keys, values, choice)
            error = float((out.double() - dense.double()).norm() / dense.double().norm())
            rows.append(
                _row("attention", name, 1 - choice.density(), grid.tokens)
                | {"speedup": whole / seconds, "seconds": seconds, "rel_l2": error, "psnr": _psnr(out, dense)}
                | {"dtype": self.dtype, "dense_seconds": whole, "choosing_seconds": choosing, "speedup_all": whole / (seconds + choosing)}
            )
        return rows

    def _selector(self, name: str) -> Selector:
        if name.startswith("random-"):
            return _Random(int(name.removeprefix("random-")), self.seed)
        built = plugins.load(METHODS, name)
        if not isinstance(built, Selector):
            raise PluginError(f"{name!r} in {METHODS} cannot be called")
        return built

    def _wavealign(self) -> Iterator[dict[str, Cell]]:
        rows, size, head_dim = -(-self.wave_tokens // 128), 128, 128
        machine = Machine()
        for name, mask in tqdm(_families(rows, self.wave_heads, self.seed), desc="wavealign", unit="family", mininterval=2):
            align = WaveAlign(wave=machine.cores * machine.programs, cache=machine.cache)
            started = time.perf_counter()
            order = align(mask, 2 * self.wave_tokens * head_dim * 2).row_order
            seconds = time.perf_counter() - started
            natural = torch.arange(rows).expand(order.shape)
            hits = [traffic(mask[0].numpy(), x[0].numpy(), 2 * size * head_dim * 2, machine).hit_ratio for x in (natural, order)]
            yield _row("wavealign", name, 1 - mask.double().mean().item(), self.wave_tokens) | {
                "seconds": seconds,
                "l2_hit": hits[1],
                "l2_hit_unordered": hits[0],
            }


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


def _families(rows: int, heads: int, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Masks [1, heads, rows, rows] as methods make them: kinds of rows in any order (clusters), bands, and blocks without any pattern."""
    draw = _generator(seed)
    at = torch.arange(rows)
    for kinds in (8, 24):
        shared = torch.rand(heads, kinds, rows, generator=draw) < torch.rand(heads, kinds, 1, generator=draw) * 0.3 + 0.05
        kind = torch.randint(0, kinds, (heads, rows), generator=draw)
        noise = torch.rand(heads, rows, rows, generator=draw) < 0.01
        yield f"{kinds} kinds of rows", (shared.gather(1, kind[..., None].expand(-1, -1, rows)) ^ noise)[None]
    band = (at[:, None] - at).abs() <= rows // 10
    yield "band", band.expand(1, heads, -1, -1)
    turned = torch.rand(heads, rows, generator=draw).argsort(-1)
    yield "band, rows shuffled", torch.stack([band[order] for order in turned])[None]
    yield "no pattern", (torch.rand(1, heads, rows, rows, generator=draw) < 0.2)


def _seconds(run: Callable[[], Tensor]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _psnr(out: Tensor, dense: Tensor) -> float | None:
    """Against the range of the dense output, in dB; None where they are equal."""
    loss = float((out.double() - dense.double()).square().mean())
    return None if loss == 0 else 10 * math.log10(float(dense.max() - dense.min()) ** 2 / loss)


def _row(kind: str, method: str, sparsity: float, tokens: int) -> dict[str, Cell]:
    row: dict[str, Cell] = dict.fromkeys(_COLUMNS)
    return row | {"kind": kind, "method": method, "sparsity": sparsity, "tokens": tokens}
