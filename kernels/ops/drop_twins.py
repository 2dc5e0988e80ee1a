"""Dropping twins: of tokens in a row, again and again those at even places that are most like some token at an odd place.

    near_e = max_o s(e, o)   over the even places e and the odd places o of what is left; the `step` tokens of largest near go

until `count` are left; what is left moves up, in its order, so that other tokens stand at even places. Of those within a millionth of the
last one that goes the later ones go (see `mmsdk.kernels.choice`). Each round depends on all before it. The kernel is one program for each
input with the rounds inside, and so is the C++ of `mmsdk.kernels.cpu.choosing`; nobody outside waits for anything.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant, normal
from mmsdk.kernels.choice import TIE, top
from mmsdk.kernels.cpu import choosing
from mmsdk.kernels.pairs import solid

__all__ = ["OP", "drop_twins"]

# Even places and odd ones that are compared at one time.
_EVEN, _ODD = 16, 128


def drop_twins(pairs: Float[Tensor, "b n n"], count: int, step: int) -> Int[Tensor, "b m"]:
    """The `count` tokens that are left, ascending, of inputs whose tokens are as similar as `pairs` says.

    Raises InputError unless 1 <= count <= n and step >= 1.
    """
    if not 1 <= count <= pairs.shape[1]:
        raise InputError(f"{count} of {pairs.shape[1]} tokens cannot be left", item="count")
    if step < 1:
        raise InputError(f"{step} tokens at a time never come to an end; drop 1 or more", item="step")
    if launchable(pairs):
        return _plan(pairs, count, step).run()[0]
    return choosing.untwinned(pairs, count, step) if choosing.here(pairs) else _reference(pairs, count, step)[0]


def _reference(pairs: Tensor, count: int, step: int) -> Result:
    b, n, _ = pairs.shape
    pairs = pairs.detach().float()
    rest = torch.arange(n, device=pairs.device).expand(b, n)
    while rest.shape[1] > count:
        even, odd = rest[:, ::2], rest[:, 1::2]
        rows = pairs.gather(1, even[:, :, None].expand(-1, -1, n))
        near = rows.gather(2, odd[:, None].expand(-1, even.shape[1], -1)).amax(dim=2)
        # of equal twins the earlier stays
        stays = top(-near, even.shape[1] - min(step, rest.shape[1] - count, even.shape[1]))
        rest = torch.cat([even.gather(1, stays), odd], dim=1).sort(dim=1).values
    return (rest.contiguous(),)


def _plan(pairs: Tensor, count: int, step: int) -> Plan:
    pairs = solid(pairs)
    b, n, _ = pairs.shape
    half = power(-(-n // 2))
    out = torch.empty(b, count, dtype=torch.int64, device=pairs.device)
    arguments: dict[str, Tensor | int | float] = {
        "pairs": pairs,
        "rest": torch.empty(b, n, dtype=torch.int32, device=pairs.device),
        "near": torch.empty(b, half, dtype=torch.float32, device=pairs.device),
        "out": out,
        "pairs_row": pairs.stride(0),
        "pairs_token": pairs.stride(1),
        "n": n,
        "count": count,
        "step": step,
    }
    constants = {"tie": TIE, "half": half, "even": min(_EVEN, half), "odd": min(_ODD, half)}
    return Plan((out,), (Launch(_kernel, (b,), arguments, constants, warps=8),))


@jit
def _kernel(
    pairs: tl.tensor,
    rest: tl.tensor,
    near: tl.tensor,
    out: tl.tensor,
    pairs_row: tl.tensor,
    pairs_token: tl.tensor,
    n: tl.tensor,
    count: tl.tensor,
    step: tl.tensor,
    tie: tl.constexpr,
    half: tl.constexpr,
    even: tl.constexpr,
    odd: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    pairs += row * pairs_row
    rest += row * n
    near += row * half
    place = tl.arange(0, half)
    for at in range(0, n, half):
        tl.store(rest + at + place, at + place, mask=at + place < n)
    # a number of the device, also where n is compiled in
    left = tl.sum(tl.where(place == 0, n, 0), 0)
    while left > count:
        # what one thread wrote another reads
        tl.debug_barrier()
        evens = (left + 1) // 2
        odds = left // 2
        for at in range(0, evens, even):
            here = at + tl.arange(0, even)
            first = tl.load(rest + 2 * here, mask=here < evens, other=0).to(tl.int64)
            best = tl.full([even], float("-inf"), tl.float32)
            for to in range(0, odds, odd):
                there = to + tl.arange(0, odd)
                second = tl.load(rest + 2 * there + 1, mask=there < odds, other=0)
                both = (here < evens)[:, None] & (there < odds)[None, :]
                some = tl.load(pairs + first[:, None] * pairs_token + second[None, :], mask=both, other=float("-inf"))
                best = tl.maximum(best, tl.max(some.to(tl.float32), 1))
            tl.store(near + here, best, mask=here < evens)
        tl.debug_barrier()
        gone = tl.minimum(tl.minimum(step, left - count), evens)
        live = place < evens
        score = tl.load(near + place, mask=live, other=float("-inf"))
        # the largest score of those that would stay
        beyond = score
        for _ in range(gone):
            hit = tl.min(tl.where(beyond == tl.max(beyond, 0), place, half), 0)
            beyond = tl.where(place == hit, float("-inf"), beyond)
        last = tl.max(beyond, 0)
        below = live & (score < last - tie)
        level = live & (score <= last + tie) & (score >= last - tie)
        quota = evens - gone - tl.sum(below.to(tl.int32), 0)
        stays = below | (level & (tl.cumsum(level.to(tl.int32), 0) <= quota))
        kept = tl.cumsum(stays.to(tl.int32), 0)
        mine = tl.load(rest + 2 * place, mask=live, other=0)
        theirs = tl.load(rest + 2 * place + 1, mask=place < odds, other=0)
        tl.debug_barrier()
        tl.store(rest + place + kept - 1, mine, mask=stays)
        tl.store(rest + place + kept, theirs, mask=place < odds)
        left -= gone
    tl.debug_barrier()
    for at in range(0, count, half):
        token = tl.load(rest + at + place, mask=at + place < count, other=0)
        tl.store(out + row * count + at + place, token.to(tl.int64), mask=at + place < count)


def _case(name: str, b: int, n: int, count: int, step: int = 8, distinct: int = 0) -> Case:
    """Cosines of directions at random; where `distinct` is given, of so many of them again and again."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        z = torch.nn.functional.normalize(normal(generator, torch.float32, b, distinct or n, 24), dim=2)
        z = z[:, torch.arange(n) % (distinct or n)]
        return (z @ z.transpose(1, 2)).to(dtype), count, step

    return Case(name, make)


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: inputs that 32-bit offsets cannot reach."""
    z = torch.nn.functional.normalize(normal(generator, torch.float32, 2, 19, 24), dim=2)
    return distant((z @ z.transpose(1, 2)).to(dtype)), 6, 3


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("one token", 1, 1, 1),
        _case("one of two", 3, 2, 1),
        _case("all", 2, 9, 9),
        _case("7 of 63", 2, 63, 7),
        _case("one of 31, by ones", 1, 31, 1, step=1),
        _case("more at a time than stand at even places", 2, 9, 2, step=100),
        _case("copies", 2, 40, 11, step=3, distinct=4),
        _case("all alike", 1, 33, 5, distinct=1),
        _case("40 of 300", 2, 300, 40, step=16),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(
        _case("51 of 512", 4, 512, 51),
        _case("102 of 1024", 2, 1024, 102),
    ),
)
