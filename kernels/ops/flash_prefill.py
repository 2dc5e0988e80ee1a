"""Attention of many new tokens without the score matrix (FlashAttention-2, arXiv 2307.08691), for sequences packed one after another.

    s_ij = scale q_i . k_j,   out_i = sum_j exp(s_ij) v_j / (sum_j exp(s_ij) + exp(sink)),   lse_i = log of that denominator

Each tile of keys updates a running maximum m, sum l and mixture o of every query: m' = max(m, max s), and l, o shrink by exp(m - m')
before exp(s - m') is added. Exact up to the order of sums. The sequences' ends are aligned: query i of s stands at position t - s + i among
the t keys. `causal` hides later keys, `window` all but the `window` nearest on each visible side, the token itself among them. A sink
(StreamingLLM's, as a learned logit per head: gpt-oss) has no value. A query that sees nothing, and has no sink, gives 0 and an lse of -inf.

Two partial results merge by lse = logaddexp(lse_1, lse_2), out = sum out_i exp(lse_i - lse), if one of them alone counted the sink.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import accumulable, jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant, normal

__all__ = ["OP", "flash_prefill"]

_WIDEST = 256
_LOG2E = 1.4426950408889634


def flash_prefill(
    query: Float[Tensor, "s h d"],
    keys: Float[Tensor, "t g d"],
    values: Float[Tensor, "t g e"],
    query_starts: Int[Tensor, " b1"],
    key_starts: Int[Tensor, " b1"],
    longest: int,
    scale: float,
    causal: bool = True,
    window: int = 0,
    sinks: Float[Tensor, " h"] | None = None,
    key_counts: Int[Tensor, " b"] | None = None,
) -> tuple[Float[Tensor, "s h e"], Float[Tensor, "s h"]]:
    """The mixtures of values and the log-sum-exp of the scores, float32.

    Sequence i is query[query_starts[i]:query_starts[i + 1]] over the same slice of keys, by key_starts; `longest` is the largest number of
    queries of a sequence (the starts stay on their device). With `key_counts` a sequence has so many keys from its start on, wherever the
    next one begins, as in a batch whose rows are padded. h / g query heads share a key-value head, in order. A `window` of 0 is none.
    Raises InputError where g does not divide h, and for heads wider than 256.
    """
    if keys.shape[1] == 0 or query.shape[1] % keys.shape[1]:
        raise InputError(f"{query.shape[1]} query heads cannot share {keys.shape[1]} key-value heads evenly", item="keys")
    if max(query.shape[2], values.shape[2]) > _WIDEST:
        raise InputError(f"heads of {query.shape[2]} and {values.shape[2]} channels; at most {_WIDEST}", item="query")
    arguments = query, keys, values, query_starts, key_starts, longest, scale, causal, window, sinks, key_counts
    out, lse = _plan(*arguments).run() if launchable(query) else _reference(*arguments)
    return out, lse


def _reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest: int,
    scale: float,
    causal: bool,
    window: int,
    sinks: Tensor | None,
    key_counts: Tensor | None,
) -> Result:
    h, g = query.shape[1], keys.shape[1]
    out = query.new_empty(*query.shape[:2], values.shape[2])
    lse = torch.empty(query.shape[:2], device=query.device)
    queries, entries = query_starts.tolist(), key_starts.tolist()
    ends = entries[1:] if key_counts is None else (key_starts[: len(key_counts)] + key_counts).tolist()
    for first, last, begin, end in zip(queries[:-1], queries[1:], entries[: len(ends)], ends, strict=True):
        k, v = keys[begin:end].float(), values[begin:end].float()
        scores = torch.einsum("sgrd,tgd->grst", query[first:last].float().unflatten(1, (g, h // g)), k).flatten(0, 1) * scale
        scores = scores.masked_fill(~_seen(last - first, end - begin, causal, window, query.device), -torch.inf)
        logs = scores.logsumexp(-1)
        logs = logs if sinks is None else torch.logaddexp(logs, sinks.float()[:, None])
        # 0 in place of -inf: all scores of such a row are -inf, and their exponentials 0
        weights = (scores - logs.masked_fill(logs == -torch.inf, 0)[..., None]).exp()
        mixed = torch.einsum("grst,tge->sgre", weights.unflatten(0, (g, h // g)), v)
        out[first:last] = mixed.flatten(1, 2).to(out.dtype)
        lse[first:last] = logs.T
    return out, lse


def _seen(s: int, t: int, causal: bool, window: int, device: torch.device) -> Tensor:
    after = torch.arange(t, device=device) - torch.arange(t - s, t, device=device)[:, None]
    seen = after <= 0 if causal else torch.ones_like(after, dtype=torch.bool)
    return seen & (after.abs() < window) if window else seen


def _plan(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest: int,
    scale: float,
    causal: bool,
    window: int,
    sinks: Tensor | None,
    key_counts: Tensor | None,
) -> Plan:
    s, h, d = query.shape
    g, e = values.shape[1:]
    query, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, keys, values))
    out = torch.empty(s, h, e, dtype=query.dtype, device=query.device)
    lse = torch.empty(s, h, dtype=torch.float32, device=query.device)
    d_block, e_block = max(power(d), 16), max(power(e), 16)
    rows, columns, warps = _tile(d_block + e_block, query.dtype, longest)
    blocks = -(-longest // rows)
    arguments: dict[str, Tensor | int | float] = {
        "query": query,
        "keys": keys,
        "values": values,
        "sinks": lse if sinks is None else sinks,
        "query_starts": query_starts,
        "key_starts": key_starts,
        "key_counts": key_starts if key_counts is None else key_counts,
        "out": out,
        "lse": lse,
        "query_token": query.stride(0),
        "query_head": query.stride(1),
        "key_token": keys.stride(0),
        "key_head": keys.stride(1),
        "value_token": values.stride(0),
        "value_head": values.stride(1),
        "heads": h,
        "blocks": blocks,
        "scale": scale * _LOG2E,
    }
    constants = {
        "group": h // g,
        "d": d,
        "e": e,
        "rows": rows,
        "columns": columns,
        "d_block": d_block,
        "e_block": e_block,
        "causal": causal,
        "window": window,
        "sink": sinks is not None,
        "counted": key_counts is not None,
        "inner": accumulable(query.dtype),
    }
    launch = Launch(_kernel, ((len(query_starts) - 1) * blocks, h), arguments, constants, warps)
    return Plan((out, lse), (launch,))


def _tile(width: int, dtype: torch.dtype, longest: int) -> tuple[int, int, int]:
    """Queries and keys of a tile, and warps: the largest that spill on none of the targets, by the channels of a key and a value."""
    if dtype == torch.float32:
        rows, columns, warps = (32, 32, 4) if width <= 128 else (16, 16, 4)
    elif width <= 256:
        rows, columns, warps = 128, 32, 8
    else:
        rows, columns, warps = (64, 32, 8) if width <= 384 else (32, 32, 4)
    small = power(longest)
    return (rows, columns, warps) if small >= rows else (max(small, 16), columns, 4)


@jit
def _kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    sinks: tl.tensor,
    query_starts: tl.tensor,
    key_starts: tl.tensor,
    key_counts: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    query_token: tl.tensor,
    query_head: tl.tensor,
    key_token: tl.tensor,
    key_head: tl.tensor,
    value_token: tl.tensor,
    value_head: tl.tensor,
    heads: tl.tensor,
    blocks: tl.tensor,
    scale: tl.tensor,
    group: tl.constexpr,
    d: tl.constexpr,
    e: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    d_block: tl.constexpr,
    e_block: tl.constexpr,
    causal: tl.constexpr,
    window: tl.constexpr,
    sink: tl.constexpr,
    counted: tl.constexpr,
    inner: tl.constexpr,
) -> None:
    sequence = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * rows
    head = tl.program_id(1).to(tl.int64)
    shared = head // group
    first = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - first
    begin = tl.load(key_starts + sequence)
    # without counts that name is the starts', of which the next one ends this sequence
    present = tl.load(key_counts + sequence) if counted else tl.load(key_starts + sequence + 1) - begin
    if start >= count:
        return

    lane = start + tl.arange(0, rows)
    position = lane + present - count
    channel = tl.arange(0, d_block)
    wide = tl.arange(0, e_block)
    real = lane < count
    token = (first + lane).to(tl.int64)
    q_at = token[:, None] * query_token + head * query_head + channel[None, :]
    q = tl.load(query + q_at, mask=real[:, None] & (channel < d)[None, :], other=0.0).to(inner)

    nearest = start + present - count
    low = 0
    high = present
    if causal:
        high = tl.minimum(present, nearest + rows)
    if window > 0:
        low = tl.maximum(nearest - window + 1, 0) // columns * columns
        high = tl.minimum(high, nearest + rows + window - 1)

    best = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, e_block], tl.float32)
    for at in range(low, high, columns):
        column = at + tl.arange(0, columns)
        there = column < present
        entry = (begin + column).to(tl.int64)
        k_at = entry[None, :] * key_token + shared * key_head + channel[:, None]
        k = tl.load(keys + k_at, mask=there[None, :] & (channel < d)[:, None], other=0.0).to(inner)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        after = column[None, :] - position[:, None]
        seen = there[None, :]
        if causal:
            seen = seen & (after <= 0)
        if window > 0:
            seen = seen & (after > -window) & (after < window)
        scores = tl.where(seen, scores, float("-inf"))
        peak = tl.maximum(best, tl.max(scores, 1))
        # where nothing was seen yet the peak is -inf, and -inf less -inf no number
        anchor = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(best - anchor)
        total = total * shrink + tl.sum(weights, 1)
        v_at = entry[:, None] * value_token + shared * value_head + wide[None, :]
        v = tl.load(values + v_at, mask=there[:, None] & (wide < e)[None, :], other=0.0).to(inner)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(inner), v, input_precision="ieee")
        best = peak

    if sink:
        drain = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        peak = tl.maximum(best, drain)
        shrink = tl.exp2(best - peak)
        total = total * shrink + tl.exp2(drain - peak)
        mixed = mixed * shrink[:, None]
        best = peak
    alive = total > 0
    divisor = tl.where(alive, total, 1.0)
    result = (mixed / divisor[:, None]).to(out.dtype.element_ty)
    tl.store(out + (token[:, None] * heads + head) * e + wide[None, :], result, mask=real[:, None] & (wide < e)[None, :])
    logs = tl.where(alive, (best + tl.log2(divisor)) * 0.6931471805599453, float("-inf"))
    tl.store(lse + token * heads + head, logs, mask=real)


def _case(
    name: str,
    lengths: tuple[tuple[int, int], ...],
    h: int,
    g: int,
    d: int,
    e: int | None = None,
    causal: bool = True,
    window: int = 0,
    sink: bool = False,
    apart: int = 0,
) -> Case:
    """`lengths` are the queries and keys of every sequence. With `apart` keys lie so far apart, and all that is no sequence's holds NaN."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        counts = torch.tensor(lengths, dtype=torch.int32)
        starts = torch.cat((torch.zeros(1, 2, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)))
        s, t = starts[-1].tolist()
        shapes = (s, h, d), (t, g, d), (t, g, e or d)
        query, keys, values = (normal(generator, dtype, *shape) for shape in shapes)
        sinks = normal(generator, dtype, h) if sink else None
        longest = int(counts[:, 0].max())
        query_starts, key_starts, count = starts[:, 0].contiguous(), starts[:, 1].contiguous(), None
        if apart:
            key_starts, count = torch.arange(len(lengths) + 1) * apart + apart - max(t for _, t in lengths), counts[:, 1].contiguous()
            own = torch.cat([begin + torch.arange(t) for begin, (_, t) in zip(key_starts.tolist(), lengths, strict=False)])
            keys, values = (x.new_full((len(lengths) * apart, *x.shape[1:]), torch.nan).index_copy(0, own, x) for x in (keys, values))
        return query, keys, values, query_starts, key_starts, longest, d**-0.5, causal, window, sinks, count

    return Case(name, make)


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09 and KA-10: tokens that 32-bit offsets cannot reach, of queries, keys and values alike."""
    query, keys, values = (distant(normal(generator, dtype, 2, 1, 16)) for _ in range(3))
    starts = torch.tensor([0, 2], dtype=torch.int32)
    return query, keys, values, starts, starts.clone(), 2, 0.25, True, 0, None, None


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("one token", ((1, 1),), 1, 1, 64),
        _case("packed, causal, group 3, head size 72", ((5, 5), (1, 1), (37, 70)), 3, 1, 72),
        _case("two-way, group 7, head size 96", ((3, 40), (9, 2)), 7, 1, 96, causal=False),
        _case("window 16, causal", ((50, 90),), 2, 2, 16, window=16),
        _case("window 5, two-way, sinks", ((20, 20),), 2, 1, 80, causal=False, window=5, sink=True),
        _case("more queries than keys", ((6, 2), (2, 0), (0, 3)), 2, 1, 64),
        _case("the same with sinks", ((6, 2), (2, 0)), 2, 1, 64, sink=True),
        _case("values narrower than keys", ((4, 4),), 2, 2, 192, 128),
        _case("head size 256", ((17, 17),), 2, 1, 256),
        _case("lengths around multiples of a tile", tuple((n, n) for n in (1, 63, 127, 129, 200)), 1, 1, 16),
        _case("keys apart, window 9, group 2", ((5, 3), (40, 50), (5, 0)), 4, 2, 24, window=9, apart=70),
        _case("group 8", ((3, 5),), 8, 1, 64),
        _case("group 24", ((3, 5),), 24, 1, 64),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(
        _case("head size 128, group 4", ((256, 256), (100, 300)), 32, 8, 128),
        _case("head size 64, group 3", ((256, 256),), 9, 3, 64),
        _case("head size 72, two-way", ((256, 256),), 16, 16, 72, causal=False),
        _case("head size 64, window and sinks", ((256, 256),), 64, 8, 64, window=128, sink=True),
        _case("head size 192 over 128", ((256, 256),), 16, 16, 192, 128),
        _case("head size 256", ((256, 256),), 8, 4, 256),
        _case("head size 128, rows of a padded batch, window", ((256, 256), (256, 100)), 32, 8, 128, window=128, apart=512),
    ),
)
