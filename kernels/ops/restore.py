"""ReSS's rounds of swaps: the drop set of each row is mended until the residual stream drifts less.

    J = g^T G g / K^2,   G = W_O^T W_O,   g = sum_dropped P_j (V_j - v),   K = 1 - sum_dropped P_j,   v = sum_j P_j V_j

Source: Residual-restoring sparse attention for 3-D vision transformers, arXiv 2609.35593, which has one fused kernel for a round; here one
program does all rounds of a row, and nothing but the mask is written. What a round does is told in `mmsdk.diffusion.attention.ress`. Of
equal gains the earlier block counts.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from mmsdk.kernels._triton import jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant, normal
from mmsdk.kernels.pairs import solid

__all__ = ["LEAST", "OP", "distances", "restore", "set_drift"]

LEAST = 1e-4
_MOST = 2048
"""Blocks of a row that one program of the kernel holds without spilling on any target; torch takes longer rows."""


def restore(
    kept: Bool[Tensor, "b h rows columns"],
    shares: Float[Tensor, "b h rows columns"],
    values: Float[Tensor, "b h columns d"],
    metric: Float[Tensor, "h d d"],
    always: Bool[Tensor, " columns"],
    count: int,
    rounds: int,
    rho: float,
) -> Bool[Tensor, "b h rows columns"]:
    """The best set that was seen, as many blocks of each row as `kept` has, which is `count`, those that are `always` kept among them.

    `shares` are P, `values` V, `metric` G.
    """
    arguments = kept, shares, values, metric, always, count, rounds, rho
    (out,) = _plan(*arguments).run() if launchable(shares) and shares.shape[3] <= _MOST else _reference(*arguments)
    return out


def set_drift(
    kept: Bool[Tensor, "b h rows columns"],
    shares: Float[Tensor, "b h rows columns"],
    values: Float[Tensor, "b h columns d"],
    metric: Float[Tensor, "h d d"],
) -> Float[Tensor, "b h rows"]:
    """J: the squared drift of each row's output when all that is not kept is dropped."""
    lost, left = _lost(kept, shares, values)
    return torch.einsum("bhrd,hde,bhre->bhr", lost, metric, lost) / left.square()


def distances(
    rows: Float[Tensor, "b h rows d"], columns: Float[Tensor, "b h columns d"], metric: Float[Tensor, "h d d"]
) -> Float[Tensor, "b h rows columns"]:
    """|W_O (row - column)|^2 of all pairs, expanded."""
    pushed = rows @ metric
    squares = (pushed * rows).sum(-1)[..., None] + ((columns @ metric) * columns).sum(-1)[:, :, None]
    return (squares - 2 * pushed @ columns.transpose(2, 3)).clamp_min(0)


def _reference(kept: Tensor, shares: Tensor, values: Tensor, metric: Tensor, always: Tensor, count: int, rounds: int, rho: float) -> Result:
    best, least = kept, set_drift(kept, shares, values, metric)
    swapped = min(count, shares.shape[3]) - int(always.sum()), shares.shape[3] - count
    for turn in range(rounds):
        moves = min(max(int(rho * count) >> (turn + 1), 1), *swapped)
        if moves <= 0:
            break
        kept = _swapped(kept, shares, values, metric, moves, always)
        drift = set_drift(kept, shares, values, metric)
        better = drift < least
        best, least = torch.where(better[..., None], kept, best), torch.where(better, drift, least)
    return (best,)


def _swapped(kept: Tensor, shares: Tensor, values: Tensor, metric: Tensor, moves: int, always: Tensor) -> Tensor:
    """The kept blocks after `moves` came back and as many went, by what each alone would do to J."""
    lost, left = _lost(kept, shares, values)
    dense = shares @ values
    pushed = torch.einsum("bhrd,hde->bhre", lost, metric)
    # of a = P_ij (V_j - v_i): g^T G a and a^T G a
    along = shares * (pushed @ values.transpose(2, 3) - (pushed * dense).sum(-1, keepdim=True))
    own = shares.square() * distances(dense, values, metric)
    now = (pushed * lost).sum(-1, keepdim=True)
    back = (now - 2 * along + own) / (left[..., None] + shares).square()
    gone = (now + 2 * along + own) / (left[..., None] - shares).clamp_min(LEAST).square()
    returning, leaving = (_smallest(x.masked_fill(out, torch.inf), moves) for x, out in ((back, kept), (gone, ~kept | always)))
    return (kept | returning) & ~leaving


def _smallest(x: Tensor, count: int) -> Tensor:
    """The `count` smallest; of equals the earlier."""
    order = x.sort(dim=-1, stable=True).indices[..., :count]
    return torch.zeros(x.shape, dtype=torch.bool, device=x.device).scatter_(-1, order, True)


def _lost(kept: Tensor, shares: Tensor, values: Tensor) -> tuple[Float[Tensor, "b h rows d"], Float[Tensor, "b h rows"]]:
    """g and K of a drop set."""
    dropped = shares.masked_fill(kept, 0)
    weight = dropped.sum(-1)
    return dropped @ values - weight[..., None] * (shares @ values), (1 - weight).clamp_min(LEAST)


def _plan(kept: Tensor, shares: Tensor, values: Tensor, metric: Tensor, always: Tensor, count: int, rounds: int, rho: float) -> Plan:
    b, h, rows, columns = shares.shape
    d, block = values.shape[3], max(power(columns), 16)
    shares, values, metric = (x.float() for x in (shares, values, metric))
    dense = shares @ values
    pushed = (dense @ metric).contiguous()
    out = torch.empty(b, h, rows, columns, dtype=torch.bool, device=shares.device)
    shares = solid(shares)
    arguments: dict[str, Tensor | int | float] = {
        "kept": kept.contiguous().view(torch.uint8),
        "shares": shares,
        # a channel of all blocks is read at one time, to the end of the program's vectors
        "values": F.pad(values.transpose(2, 3), (0, block - columns)).contiguous(),
        "metric": metric.contiguous(),
        "dense": dense.contiguous(),
        "pushed_dense": pushed,
        "squares": ((values @ metric) * values).sum(-1).contiguous(),
        "always": always.contiguous().view(torch.uint8),
        "out": out.view(torch.uint8),
        "share_row": shares.stride(0),
        "share_head": shares.stride(1),
        "share_line": shares.stride(2),
        "heads": h,
        "lines": rows,
        "columns": columns,
        "d": d,
        "count": count,
        "first": int(rho * count),
        "rounds": rounds,
    }
    constants = {"least": LEAST, "block": block, "channels": max(power(d), 16)}
    warps = 4 if columns <= 256 else 8
    return Plan((out,), (Launch(_kernel, (b * h * rows,), arguments, constants, warps),) if out.numel() else ())


@jit
def _kernel(
    kept: tl.tensor,
    shares: tl.tensor,
    values: tl.tensor,
    metric: tl.tensor,
    dense: tl.tensor,
    pushed_dense: tl.tensor,
    squares: tl.tensor,
    always: tl.tensor,
    out: tl.tensor,
    share_row: tl.tensor,
    share_head: tl.tensor,
    share_line: tl.tensor,
    heads: tl.tensor,
    lines: tl.tensor,
    columns: tl.tensor,
    d: tl.tensor,
    count: tl.tensor,
    first: tl.tensor,
    rounds: tl.tensor,
    least: tl.constexpr,
    block: tl.constexpr,
    channels: tl.constexpr,
) -> None:
    slot = tl.program_id(0).to(tl.int64)
    owner = slot // lines
    head = owner % heads
    column = tl.arange(0, block)
    there = column < columns
    channel = tl.arange(0, channels)
    inside = channel < d
    at = shares + owner // heads * share_row + head * share_head + slot % lines * share_line
    share = tl.load(at + column, mask=there, other=0.0)
    # whole numbers, since there are few registers for truths
    inner = tl.load(kept + slot * columns + column, mask=there, other=1).to(tl.int32)
    pinned = tl.load(always + column, mask=there, other=1).to(tl.int32)
    values += owner * d * block
    metric += head * d * d
    mean = tl.load(dense + slot * d + channel, mask=inside, other=0.0)
    aside = tl.load(pushed_dense + slot * d + channel, mask=inside, other=0.0)
    free = tl.minimum(count, columns) - tl.sum(tl.where(there, pinned, 0), 0)

    # |W_O (v - V_j)|^2 P_j^2
    apart = tl.load(squares + owner * columns + column, mask=there, other=0.0) + tl.sum(mean * aside, 0)
    for c in range(d):
        line = tl.load(values + c * block + column)
        apart -= 2 * tl.sum(tl.where(channel == c, aside, 0.0), 0) * line
    own = share * share * tl.maximum(apart, 0.0)

    best = inner
    lowest = float("inf")
    going = rounds
    for turn in range(rounds + 1):
        if turn <= going:
            dropped = tl.where(inner != 0, 0.0, share)
            weight = tl.sum(dropped, 0)
            left = tl.maximum(1 - weight, least)
            lost = tl.zeros([channels], tl.float32)
            for c in range(d):
                line = tl.load(values + c * block + column)
                lost = tl.where(channel == c, tl.sum(dropped * line, 0), lost)
            lost -= weight * mean
            along = tl.zeros([block], tl.float32)
            now = 0.0
            base = 0.0
            for c in range(d):
                line = tl.load(values + c * block + column)
                pushed = tl.sum(lost * tl.load(metric + channel * d + c, mask=inside, other=0.0), 0)
                along += pushed * line
                now += pushed * tl.sum(tl.where(channel == c, lost, 0.0), 0)
                base += pushed * tl.sum(tl.where(channel == c, mean, 0.0), 0)
            drift = now / (left * left)
            better = drift < lowest
            best = tl.where(better, inner, best)
            lowest = tl.where(better, drift, lowest)
            moves = tl.minimum(tl.minimum(tl.maximum(first >> (turn + 1), 1), free), columns - count)
            # what is left to do after the last round is to look at what it made
            if (turn < rounds) & (moves > 0):
                along = share * (along - base)
                back = (now - 2 * along + own) / ((left + share) * (left + share))
                rest = tl.maximum(left - share, least)
                gone = (now + 2 * along + own) / (rest * rest)
                returning = _fewest(tl.where(inner != 0, float("inf"), back), moves)
                leaving = _fewest(tl.where(inner > pinned, gone, float("inf")), moves)
                inner = (inner | returning) * (1 - leaving)
            else:
                going = turn
    tl.store(out + slot * columns + column, best.to(tl.uint8), mask=there)


@jit
def _fewest(x: tl.tensor, count: tl.tensor) -> tl.tensor:
    """1 at the `count` smallest of a vector, of equals the earlier, else 0: their bar is found by halving among all numbers."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    # in the order of the numbers
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    low = tl.min(key, 0).to(tl.int64)
    high = tl.max(key, 0).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        enough = tl.sum((key <= middle.to(tl.int32)).to(tl.int32), 0) >= count
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    bar = low.to(tl.int32)
    under = key < bar
    equal = (key == bar).to(tl.int32)
    more = count - tl.sum(under.to(tl.int32), 0)
    return tl.where(under, 1, tl.where(tl.cumsum(equal, 0) <= more, equal, 0))


def _case(name: str, b: int, h: int, rows: int, columns: int, d: int, count: int, special: int = 0, rounds: int = 5) -> Case:
    """Attention sharper than chance; `special` blocks at the beginning are always kept."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        shares = (2 * normal(generator, torch.float32, b, h, rows, columns)).softmax(-1)
        values, projection = normal(generator, torch.float32, b, h, columns, d), normal(generator, torch.float32, h, d + 3, d)
        always = torch.arange(columns) < special
        ranked = shares.masked_fill(always, 2.0).sort(dim=-1, descending=True, stable=True).indices[..., :count]
        kept = torch.zeros(shares.shape, dtype=torch.bool).scatter_(-1, ranked, True)
        return kept, shares, values, projection.transpose(1, 2) @ projection, always, count, rounds, 0.5

    return Case(name, make)


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: shares that 32-bit offsets cannot reach."""
    kept, shares, *others = _case("", 1, 2, 3, 9, 8, 4).make(generator, dtype)
    assert isinstance(shares, Tensor)
    return kept, distant(shares[0])[None], *others


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("one block", 1, 1, 1, 1, 16, 1),
        _case("all are kept", 1, 2, 3, 7, 16, 7),
        _case("11 of 40, 3 of them always", 2, 1, 2, 40, 12, 11, special=3),
        _case("as many as are always kept", 1, 2, 2, 30, 8, 5, special=5),
        _case("1 of 63, head size 72", 1, 1, 1, 63, 72, 1),
        _case("two rounds of 70", 1, 1, 2, 70, 16, 33, rounds=2),
        _case("no round", 1, 1, 2, 20, 16, 6, rounds=0),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(
        _case("17 of 64 blocks, head size 64", 1, 3, 64, 64, 64, 17),
        _case("277 of 1024 blocks, head size 128", 1, 24, 64, 1024, 128, 277, special=9),
        _case("553 of 2048 blocks, head size 64", 1, 16, 64, 2048, 64, 553, special=50),
    ),
)
