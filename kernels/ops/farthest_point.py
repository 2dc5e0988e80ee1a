"""Farthest-point seeding: tokens that are as unlike each other as can be, chosen one after the other.

    c_0 = first,   c_k = argmin_i max_{j < k} z_i . z_(c_j)

over the tokens not chosen yet; of those within a millionth of the least the earliest (see `mmsdk.kernels.choice`). Each choice depends on
all before it. The kernel is one program for each input with the loop inside: a step folds the newest token's row of products into the
largest so far of every token, takes the least, then the earliest that equals it, and nobody outside waits for anything.

Rows of a matrix too large to be held are computed in that one program, which reads all vectors at every step: bounded in memory, not fast.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant, normal
from mmsdk.kernels.choice import TIE
from mmsdk.kernels.cpu import choosing
from mmsdk.kernels.pairs import product_rows, row_of, rows_wanted, side_by_side

__all__ = ["OP", "farthest_point"]

_SCAN = 2048


def farthest_point(z: Float[Tensor, "b n d"], first: Int[Tensor, " b"], count: int) -> Int[Tensor, "b m"]:
    """`first`, then again and again the token whose most similar chosen token is the least similar.

    `z` are unit vectors, or zero. The tokens are distinct and in the order in which they were chosen. Raises InputError unless
    1 <= count <= n.
    """
    if not 1 <= count <= z.shape[1]:
        raise InputError(f"{count} of {z.shape[1]} tokens cannot be chosen", item="count")
    if launchable(z):
        return _plan(z, first, count).run()[0]
    return choosing.farthest(z, first, count) if choosing.here(z) else _reference(z, first, count)[0]


def _reference(z: Tensor, first: Tensor, count: int) -> Result:
    some = side_by_side(len(z), z.shape[1], count)
    return (torch.cat([_chosen(*part, count) for part in zip(z.split(some), first.split(some), strict=True)]),)


def _chosen(z: Tensor, first: Tensor, count: int) -> Tensor:
    b, n, _ = z.shape
    rows = product_rows(z.detach().float(), count)
    nearest = torch.full((b, n), -torch.inf, device=z.device)
    least = torch.empty(b, n, dtype=torch.bool, device=z.device)
    # the same bytes as numbers: argmax takes no truth values
    ones = least.view(torch.uint8)
    chosen = [first.long()[:, None]]
    for _ in range(1, count):
        torch.maximum(nearest, rows(chosen[-1]), out=nearest)
        # a zero vector or one of many alike would be chosen twice
        nearest.scatter_(1, chosen[-1], torch.inf)
        torch.le(nearest, nearest.amin(dim=1, keepdim=True).add_(TIE), out=least)
        chosen.append(ones.argmax(dim=1, keepdim=True))
    return torch.cat(chosen, dim=1)


def _plan(z: Tensor, first: Tensor, count: int) -> Plan:
    b, n, d = z.shape
    source, before, whole = rows_wanted(z, count)
    out = torch.empty(b, count, dtype=torch.int64, device=z.device)
    arguments: dict[str, Tensor | int | float] = {
        "source": source,
        "first": first.contiguous(),
        "nearest": torch.empty(b, n, dtype=torch.float32, device=z.device),
        "out": out,
        "source_row": source.stride(0),
        "source_token": source.stride(1),
        "n": n,
        "d": d,
        "count": count,
    }
    scan = min(power(n), _SCAN)
    constants = {"whole": whole, "tie": TIE, "scan": scan, "block": scan if whole else 64, "channels": 64}
    return Plan((out,), (*before, Launch(_kernel, (b,), arguments, constants, warps=8)))


@jit
def _kernel(
    source: tl.tensor,
    first: tl.tensor,
    nearest: tl.tensor,
    out: tl.tensor,
    source_row: tl.tensor,
    source_token: tl.tensor,
    n: tl.tensor,
    d: tl.tensor,
    count: tl.tensor,
    whole: tl.constexpr,
    tie: tl.constexpr,
    scan: tl.constexpr,
    block: tl.constexpr,
    channels: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    source += row * source_row
    nearest += row * n
    newest = tl.load(first + row).to(tl.int64)
    tl.store(out + row * count, newest)
    for step in range(1, count):
        lows = tl.full([block], float("inf"), tl.float32)
        for at in range(0, n, block):
            place = at + tl.arange(0, block)
            live = place < n
            near = row_of(source, newest, place, n, d, source_token, whole, block, channels)
            before = tl.load(nearest + place, mask=live & (step > 1), other=float("-inf"))
            near = tl.where(place == newest, float("inf"), tl.maximum(before, near))
            tl.store(nearest + place, near, mask=live)
            lows = tl.minimum(lows, tl.where(live, near, float("inf")))
        bar = tl.min(lows, 0) + tie
        # what one thread wrote another reads
        tl.debug_barrier()
        hits = tl.full([scan], 2147483647, tl.int32)
        for at in range(0, n, scan):
            place = at + tl.arange(0, scan)
            near = tl.load(nearest + place, mask=place < n, other=float("inf"))
            hits = tl.minimum(hits, tl.where((near <= bar) & (place < n), place, 2147483647))
        hit = tl.min(hits, 0)
        # nothing is below a bar that is no number; like the reference, take the first token then
        newest = tl.where(hit < n, hit, 0).to(tl.int64)
        tl.store(out + row * count + step, newest)
        tl.debug_barrier()


def _case(name: str, b: int, n: int, d: int, count: int, distinct: int = 0, dtype: torch.dtype | None = None) -> Case:
    """Directions at random; where `distinct` is given, so many of them again and again."""

    def make(generator: torch.Generator, given: torch.dtype) -> Arguments:
        z = torch.nn.functional.normalize(normal(generator, torch.float32, b, distinct or n, d), dim=2)
        z = z[:, torch.arange(n) % (distinct or n)].to(dtype or given)
        return z, torch.randint(0, n, (b,), generator=generator), count

    return Case(name, make)


def _zeros(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """PP-10: vectors without a direction, in the middle and one of them first; the first token's index in 32 bits."""
    z = torch.nn.functional.normalize(normal(generator, torch.float32, 2, 9, 6), dim=2)
    z[:, 3:6] = 0
    return z.to(dtype), torch.tensor([4, 0], dtype=torch.int32), 9


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: inputs that 32-bit offsets cannot reach; so few rows are wanted that each is computed by itself."""
    z = torch.nn.functional.normalize(normal(generator, torch.float32, 2, 50, 7), dim=2)
    return distant(z.to(dtype)), torch.tensor([49, 7]), 3


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("one token", 1, 1, 1, 1),
        _case("one of many", 3, 63, 7, 1),
        _case("7 of 63", 2, 63, 24, 7),
        _case("all", 1, 21, 16, 21),
        _case("copies", 2, 30, 9, 17, distinct=4),
        _case("row by row", 2, 129, 70, 3),
        _case("copies, row by row", 1, 70, 9, 4, distinct=3),
        _case("two scans", 1, 2100, 3, 3),
        Case("zeros", _zeros),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(
        _case("102 of 1024", 4, 1024, 1152, 102),
        _case("400 of 4000, row by row, float32", 1, 4000, 1152, 400, dtype=torch.float32),
        _case("102 of 1024, float32", 1, 1024, 1152, 102, dtype=torch.float32),
    ),
)
