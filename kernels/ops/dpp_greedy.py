"""Greedy MAP inference of a determinantal point process: tokens of high quality that are unlike each other.

    L_ij = y_i . y_j,   y_i = quality_i times the direction of token i

Each step takes the token that multiplies the determinant of the chosen ones the most; of gains within a millionth the earliest. Gains are
kept up to date with an incremental Cholesky factor (Chen, Zhang and Zhou, "Fast greedy MAP inference for determinantal point processes to
improve recommendation diversity", 2018), so that no more than the chosen tokens' rows is needed of L:

    e_i = (L_ji - sum_k c_kj c_ki) / sqrt(gain_j),   gain_i -= e_i ** 2,   gain_j = -inf

The kernel is one program for each input with the loop over the tokens to choose inside.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant, normal
from mmsdk.kernels.choice import TIE
from mmsdk.kernels.cpu import choosing
from mmsdk.kernels.pairs import product_rows, row_of, rows_wanted, side_by_side, solid

__all__ = ["OP", "dpp_greedy"]

_SCAN, _DEEP = 2048, 16


def dpp_greedy(y: Float[Tensor, "b n d"], count: int) -> Int[Tensor, "b m"]:
    """The tokens that greedily maximise the determinant, distinct, in the order in which they were chosen.

    `y` are directions times qualities. Once the determinant cannot be kept above zero (the tokens span no more dimensions), the earliest
    tokens fill the rest. Memory is that of the factor, count x n. Raises InputError unless 1 <= count <= n.
    """
    if not 1 <= count <= y.shape[1]:
        raise InputError(f"{count} of {y.shape[1]} tokens cannot be chosen", item="count")
    if launchable(y):
        return _plan(y, count).run()[0]
    return choosing.greedy(y, count) if choosing.here(y) else _reference(y, count)[0]


def _reference(y: Tensor, count: int) -> Result:
    return (torch.cat([_chosen(part, count) for part in y.split(side_by_side(len(y), y.shape[1], count))]),)


def _chosen(y: Tensor, count: int) -> Tensor:
    b, n, _ = y.shape
    y = y.detach().float()
    rows, gain = product_rows(y, count), y.square().sum(dim=2)
    factor = torch.empty(b, count, n, device=y.device)
    most = torch.empty(b, n, dtype=torch.bool, device=y.device)
    # the same bytes as numbers: argmax takes no truth values
    ones = most.view(torch.uint8)
    chosen = []
    for step in range(count):
        torch.ge(gain, gain.amax(dim=1, keepdim=True).sub_(TIE), out=most)
        pick = ones.argmax(dim=1, keepdim=True)
        chosen.append(pick)
        own, past, row = gain.gather(1, pick), factor[:, :step], factor[:, step]
        explained = past.gather(2, pick[..., None].expand(b, step, 1)).transpose(1, 2)
        left = torch.baddbmm(rows(pick)[:, None], explained, past, alpha=-1)[:, 0]
        # a gain that is zero but for rounding has no direction left to take away
        torch.mul(left, torch.where(own > TIE, own.rsqrt(), 0.0), out=row)
        gain.addcmul_(row, row, value=-1).scatter_(1, pick, -torch.inf)
    return torch.cat(chosen, dim=1)


def _plan(y: Tensor, count: int) -> Plan:
    y = solid(y)
    b, n, d = y.shape
    source, before, whole = rows_wanted(y, count)
    out = torch.empty(b, count, dtype=torch.int64, device=y.device)
    arguments: dict[str, Tensor | int | float] = {
        "y": y,
        "source": source,
        "gain": torch.empty(b, n, dtype=torch.float32, device=y.device),
        "factor": torch.empty(b, count, n, dtype=torch.float32, device=y.device),
        "out": out,
        "y_row": y.stride(0),
        "y_token": y.stride(1),
        "source_row": source.stride(0),
        "source_token": source.stride(1),
        "n": n,
        "d": d,
        "count": count,
    }
    block = min(power(n), 256) if whole else 64
    constants = {"whole": whole, "tie": TIE, "scan": min(power(n), _SCAN), "block": block, "channels": 64, "deep": _DEEP}
    return Plan((out,), (*before, Launch(_kernel, (b,), arguments, constants, warps=8)))


@jit
def _kernel(
    y: tl.tensor,
    source: tl.tensor,
    gain: tl.tensor,
    factor: tl.tensor,
    out: tl.tensor,
    y_row: tl.tensor,
    y_token: tl.tensor,
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
    deep: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    y += row * y_row
    source += row * source_row
    gain += row * n
    factor += row * count * n

    highs = tl.full([block], float("-inf"), tl.float32)
    for at in range(0, n, block):
        place = at + tl.arange(0, block)
        live = place < n
        far = place.to(tl.int64) * y_token
        squares = tl.zeros([block], tl.float32)
        for start in range(0, d, 16):
            channel = start + tl.arange(0, 16)
            part = tl.load(y + far[:, None] + channel[None, :], mask=live[:, None] & (channel < d)[None, :], other=0.0).to(tl.float32)
            squares += tl.sum(part * part, 1)
        tl.store(gain + place, squares, mask=live)
        highs = tl.maximum(highs, tl.where(live, squares, float("-inf")))
    peak = tl.max(highs, 0)

    line = factor
    for step in range(count):
        # what one thread wrote another reads
        tl.debug_barrier()
        hits = tl.full([scan], 2147483647, tl.int32)
        for at in range(0, n, scan):
            place = at + tl.arange(0, scan)
            left = tl.load(gain + place, mask=place < n, other=float("-inf"))
            hits = tl.minimum(hits, tl.where((left >= peak - tie) & (place < n), place, 2147483647))
        hit = tl.min(hits, 0)
        # nothing reaches a bar that is no number; like the reference, take the first token then
        pick = tl.where(hit < n, hit, 0).to(tl.int64)
        tl.store(out + row * count + step, pick)
        own = tl.load(gain + pick)
        scale = tl.where(own > tie, tl.rsqrt(tl.maximum(own, tie)), 0.0)
        tl.debug_barrier()

        highs = tl.full([block], float("-inf"), tl.float32)
        for at in range(0, n, block):
            place = at + tl.arange(0, block)
            live = place < n
            fresh = row_of(source, pick, place, n, d, source_token, whole, block, channels)
            for past in range(0, step, deep):
                turn = (past + tl.arange(0, deep)).to(tl.int64)
                done = turn < step
                theirs = tl.load(factor + turn * n + pick, mask=done, other=0.0)
                part = tl.load(factor + turn[:, None] * n + place[None, :], mask=done[:, None] & live[None, :], other=0.0)
                fresh -= tl.sum(theirs[:, None] * part, 0)
            fresh *= scale
            tl.store(line + place, fresh, mask=live)
            left = tl.load(gain + place, mask=live, other=float("-inf")) - fresh * fresh
            left = tl.where(place == pick, float("-inf"), left)
            tl.store(gain + place, left, mask=live)
            highs = tl.maximum(highs, left)
        peak = tl.max(highs, 0)
        line += n


def _case(name: str, b: int, n: int, d: int, count: int, distinct: int = 0, dtype: torch.dtype | None = None) -> Case:
    """Directions at random with qualities in [1/2, 1]; where `distinct` is given, so many of them again and again."""

    def make(generator: torch.Generator, given: torch.dtype) -> Arguments:
        y = torch.nn.functional.normalize(normal(generator, torch.float32, b, distinct or n, d), dim=2)
        y = y * (1 + torch.rand(b, distinct or n, 1, generator=generator)) / 2
        return y[:, torch.arange(n) % (distinct or n)].to(dtype or given), count

    return Case(name, make)


def _zeros(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """PP-10: tokens of no quality are taken last, in order."""
    y = torch.nn.functional.normalize(normal(generator, torch.float32, 2, 9, 16), dim=2)
    y[:, 2:5] = 0
    return y.to(dtype), 8


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: inputs that 32-bit offsets cannot reach; so few rows are wanted that each is computed by itself."""
    y = torch.nn.functional.normalize(normal(generator, torch.float32, 2, 50, 7), dim=2)
    return distant(y.to(dtype)), 3


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("one token", 1, 1, 1, 1),
        _case("one of many", 3, 63, 7, 1),
        _case("7 of 63", 2, 63, 24, 7),
        _case("all, more rows than are taken in at one time", 1, 21, 32, 21),
        _case("copies", 2, 30, 32, 9, distinct=4),
        _case("row by row", 2, 129, 70, 3),
        _case("two scans", 1, 2100, 3, 2),
        Case("zeros", _zeros),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(
        _case("102 of 1024", 4, 1024, 1152, 102),
        _case("400 of 4000, row by row, float32", 1, 4000, 1152, 400, dtype=torch.float32),
        _case("102 of 1024, float32", 1, 1024, 1152, 102, dtype=torch.float32),
    ),
)
