"""Nearest centre and weighted merge: one round of clustering, or what becomes of tokens once their groups are known.

    label_i = argmax_j z_i . c_j,   mean_j = sum_{label_i = j} w_i x_i / total_j,   total_j = sum_{label_i = j} w_i

Of centres within a millionth of the nearest the earliest (see `mmsdk.kernels.choice`). A group without members has mean 0 and total 0; a
token of label -1 belongs to none, and its contents, whatever they are, reach nobody. Sums are float32.

Assigning goes by slices of tokens whose cosines to all centres may be held: first the products of a slice, then for each of its tokens
the largest and the earliest that equals it. Merging adds the members of a group in their order, without atomics: the same bits in every
run and beside any other input.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant, normal
from mmsdk.kernels.choice import TIE, first_best
from mmsdk.kernels.pairs import ENTRIES, paired, solid

__all__ = ["OP", "assign_and_merge", "nearest_centre", "weighted_merge"]

# Tokens that a merging program looks at in one go, and channels that it adds up.
_MEMBERS, _CHANNELS = 32, 128


def assign_and_merge(
    z: Float[Tensor, "b n d"], centres: Float[Tensor, "b m d"], x: Float[Tensor, "b n e"], weight: Float[Tensor, "b n"] | None = None
) -> tuple[Float[Tensor, "b n"], Int[Tensor, "b n"], Float[Tensor, "b m e"], Float[Tensor, "b m"]]:
    """Each unit vector's cosine to its nearest centre, which that is, and the mean of `x` and total weight of every centre's group.

    Without `weight` every token weighs 1. Raises InputError for vectors and centres of two kinds of numbers, or where there is no centre.
    """
    _check(z, centres)
    arguments = z, centres, x, weight
    cosine, labels, means, totals = _plan(*arguments).run() if launchable(z) else _reference(*arguments)
    return cosine, labels, means, totals


def nearest_centre(z: Float[Tensor, "b n d"], centres: Float[Tensor, "b m d"]) -> tuple[Float[Tensor, "b n"], Int[Tensor, "b n"]]:
    """The first half of `assign_and_merge`."""
    _check(z, centres)
    cosine, labels = _assigning(z, centres).run() if launchable(z) else _assigned(z, centres)
    return cosine, labels


def weighted_merge(
    x: Float[Tensor, "b n e"], labels: Int[Tensor, "b n"], count: int, weight: Float[Tensor, "b n"] | None = None
) -> tuple[Float[Tensor, "b m e"], Float[Tensor, "b m"]]:
    """The second half, where the labels, all below `count`, are known."""
    arguments = x, labels, count, weight
    means, totals = _merging(*arguments).run() if launchable(x) else _merged(*arguments)
    return means, totals


def _check(z: Tensor, centres: Tensor) -> None:
    if z.dtype != centres.dtype:
        raise InputError(f"centres of {centres.dtype} meet vectors of {z.dtype}; give both in one type", item="centres")
    if not centres.shape[1]:
        raise InputError("no vector is assigned where there is no centre; give at least one", item="centres")


def _reference(z: Tensor, centres: Tensor, x: Tensor, weight: Tensor | None) -> Result:
    cosine, labels = _assigned(z, centres)
    return cosine, labels, *_merged(x, labels, centres.shape[1], weight)


def _assigned(z: Tensor, centres: Tensor) -> Result:
    b, m, _ = centres.shape
    target, rows = centres.float().transpose(1, 2), max(1, ENTRIES // max(1, b * m))
    values, indices = [], []
    for part in z.split(rows, dim=1):
        cosine = part.float() @ target
        index = first_best(cosine)
        values.append(cosine.gather(2, index[..., None])[..., 0])
        indices.append(index)
    return torch.cat(values, dim=1), torch.cat(indices, dim=1)


def _merged(x: Tensor, labels: Tensor, count: int, weight: Tensor | None) -> Result:
    b, n, e = x.shape
    # tokens of no group share one more, which is cut off again
    slot = labels.where(labels >= 0, count) + torch.arange(b, device=x.device)[:, None] * (count + 1)
    share = torch.ones(b, n, device=x.device) if weight is None else weight.float()
    terms = x.float() if weight is None else x.float() * share[..., None]
    totals = share.new_zeros(b * (count + 1)).index_add_(0, slot.flatten(), share.flatten()).view(b, count + 1)[:, :count]
    sums = share.new_zeros(b * (count + 1), e).index_add_(0, slot.flatten(), terms.flatten(0, 1)).view(b, count + 1, e)[:, :count]
    return sums / totals.where(totals > 0, 1)[..., None], totals


def _plan(z: Tensor, centres: Tensor, x: Tensor, weight: Tensor | None) -> Plan:
    assigning = _assigning(z, centres)
    merging = _merging(x, assigning.out[1], centres.shape[1], weight)
    return Plan((*assigning.out, *merging.out), (*assigning.launches, *merging.launches))


def _assigning(z: Tensor, centres: Tensor) -> Plan:
    z, centres = solid(z), solid(centres)
    b, n, _ = z.shape
    m = centres.shape[1]
    cosine = torch.empty(b, n, dtype=torch.float32, device=z.device)
    labels = torch.empty(b, n, dtype=torch.int64, device=z.device)
    rows = min(n, max(1, ENTRIES // max(1, b * m)))
    # every slice is done with it before the next one writes there
    room = torch.empty(b * rows * m, dtype=torch.float32, device=z.device)
    launches: list[Launch] = []
    for start in range(0, n, max(rows, 1)):
        found, launch = paired(z[:, start : start + rows], centres, room)
        launches += launch, _choosing(found, cosine, labels, start)
    return Plan((cosine, labels), tuple(launches))


def _choosing(found: Tensor, cosine: Tensor, labels: Tensor, start: int) -> Launch:
    b, part, m = found.shape
    arguments: dict[str, Tensor | int | float] = {
        "found": found,
        "cosines": cosine,
        "labels": labels,
        "n": cosine.shape[1],
        "m": m,
        "start": start,
        "part": part,
    }
    block = min(power(m), 1024)
    return Launch(_choose, (b * part,), arguments, {"tie": TIE, "block": block}, warps=min(max(block // 128, 1), 4))


def _merging(x: Tensor, labels: Tensor, count: int, weight: Tensor | None) -> Plan:
    x, labels = solid(x), labels.contiguous()
    b, n, e = x.shape
    means = torch.empty(b, count, e, dtype=torch.float32, device=x.device)
    totals = torch.empty(b, count, dtype=torch.float32, device=x.device)
    arguments: dict[str, Tensor | int | float] = {
        "x": x,
        "labels": labels,
        "weight": totals if weight is None else weight.contiguous(),
        "means": means,
        "totals": totals,
        "x_row": x.stride(0),
        "x_token": x.stride(1),
        "n": n,
        "m": count,
        "e": e,
    }
    constants = {"weighed": weight is not None, "many": _MEMBERS, "block": _CHANNELS}
    return Plan((means, totals), (Launch(_merge, (b * count, -(-e // _CHANNELS)), arguments, constants),))


@jit
def _choose(
    found: tl.tensor,
    cosines: tl.tensor,
    labels: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    start: tl.tensor,
    part: tl.tensor,
    tie: tl.constexpr,
    block: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    at_token = place // part * n + start + place % part
    line = found + place * m
    highs = tl.full([block], float("-inf"), tl.float32)
    for at in range(0, m, block):
        centre = at + tl.arange(0, block)
        highs = tl.maximum(highs, tl.load(line + centre, mask=centre < m, other=float("-inf")))
    bar = tl.max(highs, 0) - tie
    hits = tl.full([block], 2147483647, tl.int32)
    for at in range(0, m, block):
        centre = at + tl.arange(0, block)
        cosine = tl.load(line + centre, mask=centre < m, other=float("-inf"))
        hits = tl.minimum(hits, tl.where((cosine >= bar) & (centre < m), centre, 2147483647))
    hit = tl.min(hits, 0)
    # nothing reaches a bar that is no number; like the reference, take the first centre then
    label = tl.where(hit < m, hit, 0).to(tl.int64)
    tl.store(cosines + at_token, tl.load(line + label))
    tl.store(labels + at_token, label)


@jit
def _merge(
    x: tl.tensor,
    labels: tl.tensor,
    weight: tl.tensor,
    means: tl.tensor,
    totals: tl.tensor,
    x_row: tl.tensor,
    x_token: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    e: tl.tensor,
    weighed: tl.constexpr,
    many: tl.constexpr,
    block: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    row = place // m
    group = place % m
    channel = tl.program_id(1) * block + tl.arange(0, block)
    x += row * x_row
    sums = tl.zeros([block], tl.float32)
    shares = tl.zeros([many], tl.float32)
    for at in range(0, n, many):
        token = at + tl.arange(0, many)
        mine = tl.load(labels + row * n + token, mask=token < n, other=-1) == group
        if tl.max(mine.to(tl.int32), 0) > 0:
            share = mine.to(tl.float32)
            if weighed:
                share = tl.load(weight + row * n + token, mask=mine, other=0.0).to(tl.float32)
            far = token.to(tl.int64) * x_token
            part = tl.load(x + far[:, None] + channel[None, :], mask=mine[:, None] & (channel < e)[None, :], other=0.0).to(tl.float32)
            sums += tl.sum(part * share[:, None], 0)
            shares += share
    total = tl.sum(shares, 0)
    tl.store(means + place * e + channel, tl.div_rn(sums, tl.where(total > 0, total, 1.0)), mask=channel < e)
    if tl.program_id(1) == 0:
        tl.store(totals + place, total)


def _case(name: str, b: int, n: int, m: int, d: int, e: int, *, copies: int = 0, weighed: bool = True, full: bool = False) -> Case:
    """Centres are directions at random, all or `copies` of them distinct; `full` is in float32, as methods give vectors."""

    def make(generator: torch.Generator, given: torch.dtype) -> Arguments:
        dtype = torch.float32 if full else given
        z = torch.nn.functional.normalize(normal(generator, torch.float32, b, n, d), dim=2).to(dtype)
        centres = torch.nn.functional.normalize(normal(generator, torch.float32, b, copies or m, d), dim=2).to(dtype)
        weight = torch.randint(1, 5, (b, n), generator=generator).float() if weighed else None
        return z, centres[:, torch.arange(m) % (copies or m)], normal(generator, given, b, n, e), weight

    return Case(name, make)


def _zeros(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """PP-10: vectors without a direction equal every centre, so the first has them; weights in the dtype, some of them 0."""
    z = torch.nn.functional.normalize(normal(generator, torch.float32, 2, 20, 6), dim=2)
    z[:, ::3] = 0
    weight = torch.arange(40).view(2, 20) % 3
    return z.to(dtype), z[:, 1:6].flip(1).to(dtype), normal(generator, dtype, 2, 20, 5), weight.to(dtype)


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: tokens that 32-bit offsets cannot reach."""
    z = torch.nn.functional.normalize(normal(generator, torch.float32, 4, 7), dim=1).to(dtype)
    return distant(z)[None], distant(z[:2].flip(0))[None], distant(normal(generator, dtype, 4, 3))[None], None


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("no row", 0, 3, 2, 4, 5),
        _case("one number", 1, 1, 1, 1, 1),
        _case("63 to 7", 2, 63, 7, 72, 72, weighed=False),
        _case("several tiles of tokens and centres", 1, 70, 67, 40, 130),
        _case("more centres than tokens", 2, 5, 9, 8, 3),
        _case("copies of centres", 2, 70, 65, 9, 4, copies=3),
        Case("zeros", _zeros),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(
        _case("4000 to 400, width 1152", 1, 4000, 400, 1152, 1152),
        _case("the same of vectors in float32", 1, 4000, 400, 1152, 1152, weighed=False, full=True),
    ),
)
