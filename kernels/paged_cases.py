"""What the decode kernel over pages (`mmsdk.kernels.ops.paged_decode`) is proved by: small and odd cases, and models' sizes."""

import torch
from torch import Tensor

from mmsdk.kernels.case import Arguments, Case, distant, normal
from mmsdk.kernels.rounding import Codes, encode, pack, scale_dtype
from mmsdk.kernels.turbo import TURBO, rotation, rounded

__all__ = ["BUILDS", "CASES"]


def _case(
    name: str,
    lengths: tuple[int, ...],
    most: int,
    h: int,
    g: int,
    d: int,
    window: int = 0,
    sink: bool = False,
    bits: str = "",
    old: tuple[int, ...] = (),
    page: int = 16,
) -> Case:
    """Blocks in random order, `old` of them as codes in front; blocks and slots that no row owns hold NaN, or NaN for a scale."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        b, blocks = len(lengths), len(lengths) * most + 1
        table = torch.randperm(blocks, generator=generator)[: b * most].view(b, most).to(torch.int32)
        owned = (torch.arange(most * page) < torch.tensor(lengths)[:, None]).view(b, most, page)
        free = torch.ones(blocks, page, dtype=torch.bool)
        free[table[owned.any(-1)].long()] = ~owned[owned.any(-1)]
        query = normal(generator, dtype, b, h, d)
        sinks = normal(generator, dtype, h) if sink else None
        keys, values = (normal(generator, dtype, blocks, page, g, d).masked_fill_(free[..., None, None], torch.nan) for _ in range(2))
        older = _rounded(generator, dtype, bits, old, page, g, d) if bits else ()
        return query, keys, values, table, torch.tensor(lengths), d**-0.5, window, sinks, bits, *older

    return Case(name, make)


def _rounded(generator: torch.Generator, dtype: torch.dtype, bits: str, counts: tuple[int, ...], page: int, g: int, d: int) -> Arguments:
    b, most, blocks = len(counts), max(counts), len(counts) * max(counts) + 1
    table = torch.randperm(blocks, generator=generator)[: b * most].view(b, most)
    strange = torch.ones(blocks, dtype=torch.bool)
    strange[table[torch.arange(most) < torch.tensor(counts)[:, None]]] = False
    # blocks of other numbers than the exact ones, with a channel that is large for every token
    keys, values = (normal(generator, dtype, blocks, page, g, d) * 0.7 for _ in range(2))
    keys[..., 0] += 4
    pools = list[Tensor]()
    for x, along in ((keys, 1), (values, 3)):
        found = _turbo(x, TURBO[bits]) if bits in TURBO else encode(x, along, bits)
        pools += found.codes, *(part.masked_fill(strange[:, None, None, None], torch.nan) for part in (found.scale, found.low))
    turning = (rotation(d),) if bits in TURBO else ()
    return table, torch.tensor(counts), *pools, *turning


def _turbo(x: Tensor, bits: int) -> Codes:
    codes, lengths = rounded(x, bits)
    scale = lengths.to(scale_dtype(x.dtype))
    return Codes(pack(codes, bits), scale, torch.zeros_like(scale))


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: blocks that 32-bit offsets cannot reach."""
    keys, values = (distant(normal(generator, dtype, 2, 16, 1, 16)) for _ in range(2))
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    return normal(generator, dtype, 1, 2, 16), keys, values, table, torch.tensor([20]), 0.25, 0, None, ""


def _distant_codes(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: the same of codes and of their scales."""
    keys, values = (normal(generator, dtype, 2, 16, 1, 16) for _ in range(2))
    parts = [encode(x, along, "int4") for x, along in ((keys, 1), (values, 3))]
    pools = [distant(x) for part in parts for x in (part.codes, part.scale, part.low)]
    table = torch.tensor([[1, 0]])
    return (
        normal(generator, dtype, 1, 2, 16),
        keys,
        values,
        table,
        torch.tensor([0]),
        0.25,
        0,
        None,
        "int4",
        table,
        torch.tensor([2]),
        *pools,
    )


CASES = (
    _case("no row", (), 1, 1, 1, 64),
    _case("one token, one head", (1,), 1, 1, 1, 64),
    _case("empty row, group 3, head size 72", (0, 5, 33), 3, 3, 1, 72),
    _case("two parts, group 7, head size 96", (150, 16), 10, 7, 1, 96),
    _case("window and sinks, head size 80", (0, 9, 60), 4, 4, 2, 80, window=10, sink=True),
    _case("group 8", (18,), 2, 8, 1, 64),
    _case("group 24", (18,), 2, 24, 1, 64),
    _case("int8 behind two parts, group 3, head size 72", (137, 0), 9, 3, 1, 72, bits="int8", old=(9, 2)),
    _case("int8, empty rows, group 1, head size 96", (0, 0, 5), 1, 2, 2, 96, bits="int8", old=(0, 3, 0)),
    _case("fp8, group 24, head size 80", (18, 7), 2, 24, 1, 80, bits="fp8", old=(3, 1)),
    _case("fp8, nothing exact, head size 256", (0,), 1, 1, 1, 256, bits="fp8", old=(2,)),
    _case("int4, group 7, window and sinks", (9, 40, 0), 3, 7, 1, 64, window=45, sink=True, bits="int4", old=(3, 1, 5)),
    _case("int4, an odd head, a window of what is exact", (30,), 2, 2, 1, 19, window=20, bits="int4", old=(2,)),
    _case("int2, pages of 32", (33, 1), 2, 2, 1, 64, bits="int2", old=(1, 3), page=32),
    _case("turbo4 behind two parts, group 3, head size 72", (137, 0), 9, 3, 1, 72, bits="turbo4", old=(9, 2)),
    _case("turbo4, nothing exact, window and sinks, head size 256", (0, 3), 1, 2, 1, 256, window=20, sink=True, bits="turbo4", old=(2, 0)),
    _case("turbo2, an odd head, pages of 32", (33, 1), 2, 4, 2, 19, bits="turbo2", old=(1, 3), page=32),
    Case("offsets beyond 2**31", _distant),
    Case("codes beyond 2**31", _distant_codes),
)

BUILDS = (
    _case("head size 128, group 4", (100, 300), 32, 32, 8, 128),
    _case("head size 64, group 3", (100, 300), 32, 9, 3, 64),
    _case("head size 256, group 2", (100, 300), 32, 8, 4, 256),
    _case("int8, head size 128, group 4", (100, 300), 32, 32, 8, 128, bits="int8", old=(4, 9), page=32),
    _case("fp8, head size 128, group 4", (100, 300), 32, 32, 8, 128, bits="fp8", old=(4, 9), page=32),
    _case("int4, head size 128, group 4", (100, 300), 32, 32, 8, 128, bits="int4", old=(4, 9), page=32),
    _case("int4, head size 64, group 3, blocks of 16", (100, 300), 32, 9, 3, 64, bits="int4", old=(4, 9)),
    _case("turbo4, head size 128, group 4", (100, 300), 32, 32, 8, 128, bits="turbo4", old=(4, 9), page=32),
    _case("turbo2, head size 64, group 3", (100, 300), 32, 9, 3, 64, bits="turbo2", old=(4, 9), page=32),
    _case("turbo4, head size 256, group 2", (100, 300), 32, 8, 4, 256, bits="turbo4", old=(4, 9), page=32),
    _case("fp8, head size 256, group 2", (100, 300), 32, 8, 4, 256, bits="fp8", old=(4, 9), page=32),
)
