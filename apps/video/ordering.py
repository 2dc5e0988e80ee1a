"""What the order of rows does to a model of a GPU's cache, on patterns that methods make and on the masks of a model itself."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from tqdm import tqdm

from mmsdk import plugins
from mmsdk.apps.video.attention import METHODS
from mmsdk.apps.video.drift import Seen
from mmsdk.apps.video.rows import Row, row
from mmsdk.diffusion.attention.cache_model import Machine, traffic
from mmsdk.diffusion.attention.types import Blocks, Selection, Selector
from mmsdk.diffusion.attention.wave_align import WaveAlign

__all__ = ["of_layers", "of_patterns"]

_BLOCK, _HEAD_DIM = 128, 128
# Of more heads the cache of an H100 holds too little for any order to pay.
_ABREAST = 4


def of_patterns(tokens: int, heads: int, seed: int) -> Iterator[Row]:
    """Rows of made masks over so many tokens in blocks of 128, on a machine with the sizes of an H100."""
    for name, mask in tqdm(_families(-(-tokens // _BLOCK), heads, seed), desc="wavealign", unit="family", mininterval=2):
        yield from _rows(name, mask, tokens, _BLOCK, _HEAD_DIM, Machine())


def of_layers(told: str, seen: Sequence[Seen], methods: Sequence[str], like: int) -> Iterator[Row]:
    """Rows of masks that methods choose in some layers, on a machine as much smaller than an H100 as the clip is than `like` tokens.

    Masks of several layers stand side by side, as further heads.
    """
    for name in tqdm(methods, desc=f"wavealign, {told}", unit="method", mininterval=2):
        selector, masks, size = plugins.load(METHODS, name), list[Tensor](), 0
        assert isinstance(selector, Selector)
        for layer in seen:
            choice = selector(layer.query, layer.keys, layer.values, layer.place)
            if isinstance(choice, Selection):
                masks.append(choice.mask)
                size = _even(choice.keys)
        if masks and len({mask.shape for mask in masks}) == 1:
            _, _, tokens, head_dim = seen[0].query.shape
            share = tokens * head_dim / (like * _HEAD_DIM)
            machine = Machine(max(2, round(Machine().cores * tokens / like)), cache=round(Machine().cache * share))
            yield from _rows(f"{name}, {told}", torch.cat(masks, 1), tokens, size, head_dim, machine)


def _even(blocks: Blocks) -> int:
    return -(-blocks.length // blocks.count)


def _rows(name: str, mask: Tensor, tokens: int, block: int, head_dim: int, machine: Machine) -> Iterator[Row]:
    """Head after head, and some heads abreast, of which fewer rows each run at one time."""
    abreast = min(_ABREAST, mask.shape[1])
    yield _row(name, mask, tokens, block, head_dim, machine)
    yield _row(f"{name}, {abreast} heads abreast", mask, tokens, block, head_dim, replace(machine, abreast=abreast))


def _row(name: str, mask: Tensor, tokens: int, block: int, head_dim: int, machine: Machine) -> Row:
    align = WaveAlign(wave=machine.wave, cache=machine.cache)
    started = time.perf_counter()
    order = align(mask, machine.abreast * 2 * tokens * head_dim * 2).row_order
    taken = time.perf_counter() - started
    natural = torch.arange(mask.shape[2]).expand(order.shape)
    plain, aligned = (traffic(mask[0].numpy(), x[0].numpy(), 2 * block * head_dim * 2, machine) for x in (natural, order))
    return row("wavealign", name, tokens, 1 - mask.double().mean().item()) | {
        "seconds": taken,
        "l2_hit": aligned.hit_ratio,
        "l2_hit_unordered": plain.hit_ratio,
        "memory_reads_saved": 1 - (aligned.reads - aligned.hits) / max(plain.reads - plain.hits, 1),
    }


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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
