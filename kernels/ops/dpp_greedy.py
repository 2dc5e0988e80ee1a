"""Greedy MAP inference of a determinantal point process: tokens of high quality that are unlike each other.

    L_ij = y_i . y_j,   y_i = quality_i times the direction of token i

Each step takes the token that multiplies the determinant of the chosen ones the most; of gains within a millionth the earliest. Gains are
kept up to date with an incremental Cholesky factor (Chen, Zhang and Zhou, "Fast greedy MAP inference for determinantal point processes to
improve recommendation diversity", 2018), so that no more than the chosen tokens' rows is needed of L:

    e_i = (L_ji - sum_k c_kj c_ki) / sqrt(gain_j),   gain_i -= e_i ** 2,   gain_j = -inf

Where all pairs of an input are held, the kernel is one program for each input with the loop over the tokens to choose inside. Of a matrix
too large to be held a step is a launch over blocks of tokens. Each program looks for the best gain by itself, in what the launch before it
wrote, and does what follows from it for its own block; nothing is told to the host.
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

__all__ = ["OP", "dpp_greedy"]

_SCAN, _BLOCK, _CHANNELS, _DEEP = 2048, 32, 64, 16


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
    loss = torch.empty(b, n, dtype=torch.float32, device=y.device)
    factor = torch.empty(b, count, n, dtype=torch.float32, device=y.device)
    out = torch.empty(b, count, dtype=torch.int64, device=y.device)
    given: dict[str, Tensor | int | float] = {"y": y, "loss": loss, "y_row": y.stride(0), "y_token": y.stride(1), "n": n, "d": d}
    begin = Launch(_begin, (b * -(-n // _BLOCK),), given, {"block": _BLOCK, "channels": _CHANNELS})
    held = all_pairs(y, count)
    if held is None:
        return Plan((out,), (begin, *_steps(y, loss, factor, out)))
    pairs, launch = held
    arguments: dict[str, Tensor | int | float] = {"pairs": pairs, "loss": loss, "factor": factor, "out": out, "n": n, "count": count}
    constants = {"tie": TIE, "scan": min(power(n), _SCAN), "block": min(power(n), 256), "deep": _DEEP}
    return Plan((out,), (launch, begin, Launch(_kernel, (b,), arguments, constants, warps=8)))


def _steps(y: Tensor, loss: Tensor, factor: Tensor, out: Tensor) -> tuple[Launch, ...]:
    """A launch for each choice; losses go from one tensor to the other and back."""
    (b, n, d), count = y.shape, out.shape[1]
    losses = [loss, torch.empty_like(loss)]
    launches = []
    for step in range(count):
        arguments: dict[str, Tensor | int | float] = {
            "y": y,
            "before": losses[step % 2],
            "after": losses[1 - step % 2],
            "factor": factor,
            "line": factor[:, step],
            "out": out[:, step],
            "y_row": y.stride(0),
            "y_token": y.stride(1),
            "factor_row": factor.stride(0),
            "out_row": count,
            "n": n,
            "d": d,
            "step": step,
        }
        constants = {"tie": TIE, "scan": min(power(n), _SCAN), "block": _BLOCK, "channels": _CHANNELS, "deep": _DEEP}
        launches.append(Launch(_step, (b * -(-n // _BLOCK),), arguments, constants | {"ends": step == count - 1}))
    return tuple(launches)


@jit
def _begin(
    y: tl.tensor,
    loss: tl.tensor,
    y_row: tl.tensor,
    y_token: tl.tensor,
    n: tl.tensor,
    d: tl.tensor,
    block: tl.constexpr,
    channels: tl.constexpr,
) -> None:
    """The losses of all tokens, which are their gains with the sign turned: less the squares of their lengths."""
    parts = (n + block - 1) // block
    row = (tl.program_id(0) // parts).to(tl.int64)
    place = tl.program_id(0) % parts * block + tl.arange(0, block)
    live = place < n
    far = row * y_row + place.to(tl.int64) * y_token
    squares = tl.zeros([block, channels], tl.float32)
    for at in range(0, d, channels):
        channel = at + tl.arange(0, channels)
        part = tl.load(y + far[:, None] + channel[None, :], mask=live[:, None] & (channel < d)[None, :], other=0.0).to(tl.float32)
        squares += part * part
    tl.store(loss + row * n + place, -tl.sum(squares, 1), mask=live)


@jit
def _unexplained(
    fresh: tl.tensor,
    factor: tl.tensor,
    pick: tl.tensor,
    place: tl.tensor,
    n: tl.tensor,
    step: tl.tensor,
    deep: tl.constexpr,
) -> tl.tensor:
    """A row of products without what the `step` earlier choices explain of it."""
    for past in range(0, step, deep):
        turn = (past + tl.arange(0, deep)).to(tl.int64)
        done = turn < step
        theirs = tl.load(factor + turn * n + pick, mask=done, other=0.0)
        part = tl.load(factor + turn[:, None] * n + place[None, :], mask=done[:, None] & (place < n)[None, :], other=0.0)
        fresh -= tl.sum(theirs[:, None] * part, 0)
    return fresh


@jit
def _kernel(
    pairs: tl.tensor,
    loss: tl.tensor,
    factor: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    count: tl.tensor,
    tie: tl.constexpr,
    scan: tl.constexpr,
    block: tl.constexpr,
    deep: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    pairs += row * n * n
    loss += row * n
    factor += row * count * n
    line = factor
    for step in range(count):
        pick = earliest(loss, n, tie, scan)
        tl.store(out + row * count + step, pick)
        own = -tl.load(loss + pick)
        # a gain that is zero but for rounding has no direction left to take away
        scale = tl.where(own > tie, tl.rsqrt(tl.maximum(own, tie)), 0.0)
        # what one thread reads another writes
        tl.debug_barrier()
        for at in range(0, n, block):
            place = at + tl.arange(0, block)
            live = place < n
            fresh = tl.load(pairs + pick * n + place, mask=live, other=0.0)
            fresh = _unexplained(fresh, factor, pick, place, n, step, deep) * scale
            tl.store(line + place, fresh, mask=live)
            left = tl.load(loss + place, mask=live, other=0.0) + fresh * fresh
            tl.store(loss + place, tl.where(place == pick, float("inf"), left), mask=live)
        tl.debug_barrier()
        line += n


@jit
def _step(
    y: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    factor: tl.tensor,
    line: tl.tensor,
    out: tl.tensor,
    y_row: tl.tensor,
    y_token: tl.tensor,
    factor_row: tl.tensor,
    out_row: tl.tensor,
    n: tl.tensor,
    d: tl.tensor,
    step: tl.tensor,
    tie: tl.constexpr,
    scan: tl.constexpr,
    block: tl.constexpr,
    channels: tl.constexpr,
    deep: tl.constexpr,
    ends: tl.constexpr,
) -> None:
    parts = (n + block - 1) // block
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    pick = earliest(before + row * n, n, tie, scan)
    tl.store(out + row * out_row, pick, mask=part == 0)
    if not ends:
        place = part * block + tl.arange(0, block)
        live = place < n
        own = -tl.load(before + row * n + pick)
        scale = tl.where(own > tie, tl.rsqrt(tl.maximum(own, tie)), 0.0)
        fresh = row_of(y + row * y_row, pick, place, n, d, y_token, block, channels)
        fresh = _unexplained(fresh, factor + row * factor_row, pick, place, n, step, deep) * scale
        tl.store(line + row * factor_row + place, fresh, mask=live)
        left = tl.load(before + row * n + place, mask=live, other=0.0) + fresh * fresh
        tl.store(after + row * n + place, tl.where(place == pick, float("inf"), left), mask=live)


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
        _case("two scans, row by row", 1, 2100, 3, 2),
        _case("5 of 1600, row by row", 1, 1600, 24, 5),
        _case("copies, 4 of 1501 beside others, row by row", 2, 1501, 12, 4, distinct=7),
        Case("zeros", _zeros),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(
        _case("102 of 1024", 4, 1024, 1152, 102),
        _case("400 of 4000, row by row, float32", 1, 4000, 1152, 400, dtype=torch.float32),
        _case("102 of 1024, float32", 1, 1024, 1152, 102, dtype=torch.float32),
    ),
)
