"""The lightning indexer: the k entries that each query reads, by scores of a few small heads (DeepSeek-V3.2, arXiv 2512.02556).

    I(t, e) = sum_h w_h(t) relu(q_h(t) . k_e) + bias(t, e)

A query chooses among the entries that it sees, the first `seen` whose bias is not -inf: causality comes before the choice. Of equal
scores the earlier entry wins; the chosen ones stand in ascending order, and -1 where there are fewer. Sums are float32, whatever the dtype.

Two launches: one writes the scores, a tile of entries of a query to each program; the other gives each query a program, which finds the
k-th largest score by its bits, two at a time, in sixteen passes over the scores, and then writes down what lies above it.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import accumulable, jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant
from mmsdk.kernels.pairs import solid

__all__ = ["OP", "indexer"]

_WIDEST = 256
# Heads and entries of a tile of scores, entries of a step of the choice.
_HEADS, _COLUMNS, _STEP = 64, 32, 1024


def indexer(
    query: Float[Tensor, "b s h d"],
    weights: Float[Tensor, "b s h"],
    keys: Float[Tensor, "b t d"],
    seen: Int[Tensor, "b s"],
    most: int,
    bias: Float[Tensor, "b s t"] | None = None,
) -> Int[Tensor, "b s k"]:
    """The k = min(most, t) entries that each query reads, int32, ascending, -1 behind them where it sees fewer.

    The weights hold the scales. Raises InputError for `most` below 1 and heads wider than 256.
    """
    if most < 1:
        raise InputError(f"it is {most}, it must be at least 1", item="most")
    if query.shape[3] > _WIDEST:
        raise InputError(f"heads of {query.shape[3]} channels; at most {_WIDEST}", item="query")
    arguments = query, weights, keys, seen, most, bias
    (index,) = _plan(*arguments).run() if launchable(query) else _reference(*arguments)
    return index


def _reference(query: Tensor, weights: Tensor, keys: Tensor, seen: Tensor, most: int, bias: Tensor | None) -> Result:
    t = keys.shape[1]
    products = torch.einsum("bshd,btd->bsht", query.float(), keys.float()).relu_()
    scores = (weights.float()[..., None] * products).sum(2)
    scores = scores if bias is None else scores + bias.float()
    scores = scores.masked_fill(torch.arange(t, device=keys.device) >= seen[..., None], -torch.inf)
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :most]
    chosen = order.masked_fill(scores.gather(-1, order) == -torch.inf, t).sort(-1).values
    return (chosen.masked_fill(chosen == t, -1).int(),)


def _plan(query: Tensor, weights: Tensor, keys: Tensor, seen: Tensor, most: int, bias: Tensor | None) -> Plan:
    b, s, h, d = query.shape
    t = keys.shape[1]
    query, keys = solid(query), solid(keys)
    scores = torch.empty(b, s, t, dtype=torch.float32, device=query.device)
    index = torch.empty(b, s, min(most, t), dtype=torch.int32, device=query.device)
    if not index.numel():
        return Plan((index,), ())
    over = scores if bias is None else solid(bias.expand(b, s, t))
    tiles = -(-t // _COLUMNS)
    score = Launch(
        _score,
        (b * s * tiles,),
        {
            "query": query,
            "weights": weights.contiguous(),
            "keys": keys,
            "seen": seen.contiguous(),
            "bias": over,
            "scores": scores,
            "query_row": query.stride(0),
            "query_token": query.stride(1),
            "query_head": query.stride(2),
            "key_row": keys.stride(0),
            "key_token": keys.stride(1),
            "bias_row": over.stride(0),
            "bias_token": over.stride(1),
            "tokens": s,
            "entries": t,
            "tiles": tiles,
            "heads": h,
        },
        {
            "d": d,
            "biased": bias is not None,
            "inner": accumulable(query.dtype),
            "rows": min(max(power(h), 16), _HEADS),
            "columns": _COLUMNS,
            "block": max(power(d), 16),
        },
    )
    chosen: dict[str, Tensor | int | float] = {"scores": scores, "index": index, "entries": t, "most": index.shape[2]}
    return Plan((index,), (score, Launch(_choose, (b * s,), chosen, {"step": min(power(t), _STEP)})))


@jit
def _score(
    query: tl.tensor,
    weights: tl.tensor,
    keys: tl.tensor,
    seen: tl.tensor,
    bias: tl.tensor,
    scores: tl.tensor,
    query_row: tl.tensor,
    query_token: tl.tensor,
    query_head: tl.tensor,
    key_row: tl.tensor,
    key_token: tl.tensor,
    bias_row: tl.tensor,
    bias_token: tl.tensor,
    tokens: tl.tensor,
    entries: tl.tensor,
    tiles: tl.tensor,
    heads: tl.tensor,
    d: tl.constexpr,
    biased: tl.constexpr,
    inner: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
) -> None:
    asker = (tl.program_id(0) // tiles).to(tl.int64)
    row = asker // tokens
    token = asker % tokens
    entry = (tl.program_id(0) % tiles * columns + tl.arange(0, columns)).to(tl.int64)
    there = entry < tl.minimum(tl.load(seen + asker).to(tl.int64), entries)
    channel = tl.arange(0, block)
    narrow = channel < d
    k_at = keys + row * key_row + entry[None, :] * key_token
    k = tl.load(k_at + channel[:, None], mask=there[None, :] & narrow[:, None], other=0.0).to(inner)

    found = tl.zeros([columns], tl.float32)
    for low in range(0, heads, rows):
        head = low + tl.arange(0, rows)
        real = head < heads
        q_at = query + row * query_row + token * query_token + head.to(tl.int64)[:, None] * query_head
        q = tl.load(q_at + channel[None, :], mask=real[:, None] & narrow[None, :], other=0.0).to(inner)
        weight = tl.load(weights + asker * heads + head, mask=real, other=0.0).to(tl.float32)
        found += tl.sum(tl.maximum(tl.dot(q, k, input_precision="ieee"), 0.0) * weight[:, None], 0)
    if biased:
        found += tl.load(bias + row * bias_row + token * bias_token + entry, mask=there, other=0.0).to(tl.float32)
    tl.store(scores + asker * entries + entry, tl.where(there, found, float("-inf")), mask=entry < entries)


@jit
def _choose(scores: tl.tensor, index: tl.tensor, entries: tl.tensor, most: tl.tensor, step: tl.constexpr) -> None:
    asker = tl.program_id(0).to(tl.int64)
    # the k-th largest rank, found two bits at a time from above: as many bits as leave k ranks that are no smaller
    border = tl.zeros([], tl.int64)
    for pair in range(16):
        unit = tl.full([], 1, tl.int64) << (30 - 2 * pair)
        one = tl.zeros([], tl.int32)
        two = tl.zeros([], tl.int32)
        three = tl.zeros([], tl.int32)
        for at in range(0, entries, step):
            rank = _ranked(scores, asker, at, entries, step)
            one += tl.sum((rank >= border + unit).to(tl.int32))
            two += tl.sum((rank >= border + 2 * unit).to(tl.int32))
            three += tl.sum((rank >= border + 3 * unit).to(tl.int32))
        border += ((one >= most).to(tl.int64) + (two >= most).to(tl.int64) + (three >= most).to(tl.int64)) * unit

    above = tl.zeros([], tl.int32)
    for at in range(0, entries, step):
        above += tl.sum((_ranked(scores, asker, at, entries, step) > border).to(tl.int32))
    equal = tl.zeros([], tl.int32)
    written = tl.zeros([], tl.int32)
    for at in range(0, entries, step):
        rank = _ranked(scores, asker, at, entries, step)
        same = ((rank == border) & (rank > 0)).to(tl.int32)
        earlier = equal + tl.cumsum(same, 0) - same
        taken = ((rank > border) | ((same > 0) & (earlier < most - above))).to(tl.int32)
        place = written + tl.cumsum(taken, 0) - taken
        tl.store(index + asker * most + place, at + tl.arange(0, step), mask=taken > 0)
        equal += tl.sum(same)
        written += tl.sum(taken)
    for at in range(written, most, step):
        place = at + tl.arange(0, step)
        tl.store(index + asker * most + place, tl.full([step], -1, tl.int32), mask=place < most)


@jit
def _ranked(scores: tl.tensor, asker: tl.tensor, at: tl.tensor, entries: tl.tensor, step: tl.constexpr) -> tl.tensor:
    """Scores as whole numbers above 0 in the same order, by their bits; 0 for -inf and what is no score."""
    entry = at + tl.arange(0, step)
    score = tl.load(scores + asker * entries + entry, mask=entry < entries, other=float("-inf"))
    # both zeros are one number
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648
    return tl.where(score > float("-inf"), order, 0)


def _case(name: str, b: int, s: int, h: int, d: int, t: int, most: int, biased: bool = False) -> Case:
    """Numbers whose products and sums are exact, so that equal scores are equal in any order; entries that nobody sees hold NaN.

    Rows see 0, 1, 2, ... entries fewer than there are, and the queries of a row one more each.
    """

    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        query, keys = (torch.randint(-2, 3, size, generator=generator).to(dtype) for size in ((b, s, h, d), (b, t, d)))
        weights = torch.randint(-3, 5, (b, s, h), generator=generator) / 4
        seen = (t - torch.arange(b)[:, None] * (t // 2) - s + 1 + torch.arange(s)).clamp_min(0)
        keys = keys.masked_fill((torch.arange(t) >= seen.amax(1)[:, None])[..., None], torch.nan)
        bias = torch.zeros(1, 1, t).masked_fill(torch.rand(1, 1, t, generator=generator) < 0.3, -torch.inf).expand(b, s, t)
        return query, weights, keys, seen, most, bias if biased else None

    return Case(name, make)


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: keys that 32-bit offsets cannot reach."""
    keys = distant(torch.randint(-2, 3, (3, 8), generator=generator).to(dtype))[None]
    query = torch.randint(-2, 3, (1, 1, 2, 8), generator=generator).to(dtype)
    return query, torch.ones(1, 1, 2), keys, torch.tensor([[3]]), 2, None


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("one entry, one head", 1, 1, 1, 8, 1, 1),
        _case("three heads, width 24, some see less than is chosen", 3, 5, 3, 24, 45, 20),
        _case("80 heads, width 72, a mask, steps of 1,024", 2, 1, 80, 72, 1100, 64, biased=True),
        _case("more wanted than there are", 2, 3, 2, 16, 7, 9),
        _case("nobody sees anything", 2, 4, 2, 16, 2, 2),
        _case("no entry", 1, 2, 2, 16, 0, 4),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(
        _case("64 heads of 128, 2048 of 8192", 2, 1, 64, 128, 8192, 2048),
        _case("64 heads of 128 with a mask, 512 of 8192", 2, 16, 64, 128, 8192, 512, biased=True),
        _case("4 heads of 128, 16 of 512", 2, 16, 4, 128, 512, 16),
    ),
)
