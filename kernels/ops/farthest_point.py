"""Farthest-point seeding: tokens that are as unlike each other as can be, chosen one after the other.

    c_0 = first,   c_k = argmin_i max_{j < k} z_i . z_(c_j)

over the tokens not chosen yet; of those within a millionth of the least the earliest (see `mmsdk.kernels.choice`). Each choice depends on
all before it. Where all pairs of an input are held, the kernel is one program for each input with the loop inside: a step folds the newest
token's row of products into the largest so far of every token, takes the least, then the earliest that equals it, and nobody outside waits
for anything.

Of a matrix too large to be held a step is a launch over blocks of tokens. Each program looks for the newest token by itself, in what the
launch before it wrote, computes its own block's products, and writes what is nearest now beside what was; nothing is told to the host.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant, normal
from mmsdk.kernels.choice import TIE
from mmsdk.kernels.cpu import choosing
from mmsdk.kernels.pairs import all_pairs, earliest, product_rows, row_of, side_by_side, solid

__all__ = ["OP", "farthest_point"]

_SCAN, _BLOCK, _CHANNELS = 2048, 32, 64


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
    z, first = solid(z), first.contiguous()
    b, n, _ = z.shape
    out = torch.empty(b, count, dtype=torch.int64, device=z.device)
    held = all_pairs(z, count)
    if held is None:
        return Plan((out,), _steps(z, first, out))
    pairs, launch = held
    arguments: dict[str, Tensor | int | float] = {
        "pairs": pairs,
        "first": first,
        "nearest": torch.empty(b, n, dtype=torch.float32, device=z.device),
        "out": out,
        "n": n,
        "count": count,
    }
    constants = {"tie": TIE, "scan": min(power(n), _SCAN)}
    return Plan((out,), (launch, Launch(_kernel, (b,), arguments, constants, warps=8)))


def _steps(z: Tensor, first: Tensor, out: Tensor) -> tuple[Launch, ...]:
    """A launch for each choice; what is nearest goes from one tensor to the other and back."""
    (b, n, d), count = z.shape, out.shape[1]
    nearest = [torch.empty(b, n, dtype=torch.float32, device=z.device) for _ in range(2)]
    launches = []
    for step in range(count):
        arguments: dict[str, Tensor | int | float] = {
            "vectors": z,
            "first": first,
            "before": nearest[step % 2],
            "after": nearest[1 - step % 2],
            "out": out[:, step],
            "vectors_row": z.stride(0),
            "vectors_token": z.stride(1),
            "out_row": count,
            "n": n,
            "d": d,
        }
        constants = {"tie": TIE, "scan": min(power(n), _SCAN), "block": _BLOCK, "channels": _CHANNELS}
        constants |= {"begins": step == 0, "ends": step == count - 1}
        launches.append(Launch(_step, (b * -(-n // _BLOCK),), arguments, constants))
    return tuple(launches)


@jit
def _kernel(
    pairs: tl.tensor,
    first: tl.tensor,
    nearest: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    count: tl.tensor,
    tie: tl.constexpr,
    scan: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    pairs += row * n * n
    nearest += row * n
    newest = tl.load(first + row).to(tl.int64)
    tl.store(out + row * count, newest)
    for step in range(1, count):
        for at in range(0, n, scan):
            place = at + tl.arange(0, scan)
            live = place < n
            near = tl.load(pairs + newest * n + place, mask=live, other=0.0)
            before = tl.load(nearest + place, mask=live & (step > 1), other=float("-inf"))
            tl.store(nearest + place, tl.where(place == newest, float("inf"), tl.maximum(before, near)), mask=live)
        # what one thread wrote another reads
        tl.debug_barrier()
        newest = earliest(nearest, n, tie, scan)
        tl.store(out + row * count + step, newest)
        tl.debug_barrier()


@jit
def _step(
    vectors: tl.tensor,
    first: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    out: tl.tensor,
    vectors_row: tl.tensor,
    vectors_token: tl.tensor,
    out_row: tl.tensor,
    n: tl.tensor,
    d: tl.tensor,
    tie: tl.constexpr,
    scan: tl.constexpr,
    block: tl.constexpr,
    channels: tl.constexpr,
    begins: tl.constexpr,
    ends: tl.constexpr,
) -> None:
    parts = (n + block - 1) // block
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    newest = tl.load(first + row).to(tl.int64) if begins else earliest(before + row * n, n, tie, scan)
    tl.store(out + row * out_row, newest, mask=part == 0)
    if not ends:
        place = part * block + tl.arange(0, block)
        live = place < n
        near = row_of(vectors + row * vectors_row, newest, place, n, d, vectors_token, block, channels)
        if not begins:
            near = tl.maximum(tl.load(before + row * n + place, mask=live, other=float("-inf")), near)
        tl.store(after + row * n + place, tl.where(place == newest, float("inf"), near), mask=live)


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
        _case("two scans, row by row", 1, 2100, 3, 3),
        _case("6 of 1600, row by row", 1, 1600, 8, 6),
        _case("copies, 4 of 1501 beside others, row by row", 2, 1501, 6, 4, distinct=5),
        Case("zeros", _zeros),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(
        _case("102 of 1024", 4, 1024, 1152, 102),
        _case("400 of 4000, row by row, float32", 1, 4000, 1152, 400, dtype=torch.float32),
        _case("102 of 1024, float32", 1, 1024, 1152, 102, dtype=torch.float32),
    ),
)
