"""Attention of one new token per row over a paged cache (PagedAttention, arXiv 2309.06180), its length split among programs.

    s_j = scale q . k_j,   out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink)),   lse = log of that denominator

Token j of row b lies in block table[b, j // page] at slot j % page; lengths are true ones, per row. One program takes a part of a row's
tokens for the r = h / g query heads that share a key-value head, so that every key is read once (split-KV, Flash-Decoding);
`mmsdk.kernels.parts` merges the parts by their log-sum-exps. A row without tokens and without a sink gives 0 and an lse of -inf. `window`
keeps the last tokens alone.

A row may have older tokens in front of these, in whole blocks of codes (`mmsdk.kernels.older`). They take parts of their own in the same
launch, and are read as codes.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import accumulable, jit, launchable, power, tl
from mmsdk.kernels.case import Launch, Op, Plan, Result
from mmsdk.kernels.older import KINDS, Older, flat, of_codes, over_codes, reads, unpacked
from mmsdk.kernels.paged_cases import BUILDS, CASES
from mmsdk.kernels.parts import LOG2E, leave, merged, parts_of, share_of, unmerged, weighed
from mmsdk.kernels.turbo import turn, turn_back

__all__ = ["OP", "paged_decode"]

_WIDEST = 256


def paged_decode(
    query: Float[Tensor, "b h d"],
    keys: Float[Tensor, "blocks page g d"],
    values: Float[Tensor, "blocks page g d"],
    table: Int[Tensor, "b most"],
    lengths: Int[Tensor, " b"],
    scale: float,
    window: int = 0,
    sinks: Float[Tensor, " h"] | None = None,
    older: Older | None = None,
) -> tuple[Float[Tensor, "b h d"], Float[Tensor, "b h"]]:
    """The mixtures of values and the log-sum-exp of the scores, float32. What lies beyond a row's length is never read.

    Raises InputError where g does not divide h, for heads wider than 256, and for older blocks that `reads` does not hold for.
    """
    if keys.shape[2] == 0 or query.shape[1] % keys.shape[2]:
        raise InputError(f"{query.shape[1]} query heads cannot share {keys.shape[2]} key-value heads evenly", item="keys")
    if query.shape[2] > _WIDEST:
        raise InputError(f"heads of {query.shape[2]} channels; at most {_WIDEST}", item="query")
    if older is not None and not reads(older.bits, older.page):
        known = f"there are {', '.join(KINDS)} in blocks of a multiple of 16"
        raise InputError(f"blocks of {older.page} tokens as {older.bits}; {known}", item="older")
    arguments = query, keys, values, table, lengths, scale, window, sinks, "" if older is None else older.bits
    pools = flat(older)
    out, lse = _plan(*arguments, *pools).run() if launchable(query) else _reference(*arguments, *pools)
    return out, lse


def _reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    sinks: Tensor | None,
    bits: str,
    *older: Tensor,
) -> Result:
    h, g = query.shape[1], keys.shape[2]
    place = torch.arange(table.shape[1] * keys.shape[1], device=query.device)
    seen = place < lengths[:, None]
    k, v = (cache[table.clamp(min=0).long()].float().flatten(1, 2) for cache in (keys, values))
    if bits:
        past, *both = unpacked(bits, query.shape[2], query.dtype, *older[:8])
        seen = torch.cat((past, seen), 1)
        k, v = (torch.cat(pair, 1) for pair in zip(both, (k, v), strict=True))
    if window:
        # counted from the last token on
        seen = seen & (seen.flip(1).cumsum(1).flip(1) <= window)
    # what no token owns may hold anything, NaN as well
    k, v = (x.masked_fill(~seen[..., None, None], 0) for x in (k, v))
    scores = torch.einsum("bgrd,btgd->bgrt", query.float().unflatten(1, (g, h // g)), k).flatten(1, 2) * scale
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    lse = lse if sinks is None else torch.logaddexp(lse, sinks.float())
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    mixed = torch.einsum("bgrt,btgd->bgrd", weights.unflatten(1, (g, h // g)), v).flatten(1, 2)
    return mixed.to(query.dtype), lse


def _plan(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    sinks: Tensor | None,
    bits: str,
    *older: Tensor,
) -> Plan:
    b, h, d = query.shape
    page, g = keys.shape[1:3]
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise InputError("the channels of a cache lie side by side in memory", item="keys")
    query, table = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, table))
    old_parts = parts_of(older[0].shape[1] * older[2].shape[1], b * g) if bits else 0
    parts = parts_of(table.shape[1] * page, b * g)
    partial, partial_lse = unmerged(b, h, old_parts + parts, d, query.device)
    columns = 16 if query.dtype == torch.float32 else 32 if d > 64 or bits else 64
    old_arguments, old_constants = of_codes(bits, partial_lse, columns, *older[:8])
    turning = older[8:]
    before: tuple[Launch, ...] = ()
    after: tuple[Launch, ...] = ()
    if turning:
        both, launch = turn(query, turning[0])
        query, before = both[0], (launch,)
        after = (turn_back(partial[:, :, :old_parts].flatten(0, 1), turning[0], query.dtype),)
    split = Launch(
        _split,
        (b * g, old_parts + parts),
        {
            "query": query,
            "keys": keys,
            "values": values,
            "table": table,
            "lengths": lengths,
            "partial": partial,
            "partial_lse": partial_lse,
            "query_row": query.stride(0),
            "query_head": query.stride(1),
            "key_block": keys.stride(0),
            "key_slot": keys.stride(1),
            "key_head": keys.stride(2),
            "value_block": values.stride(0),
            "value_slot": values.stride(1),
            "value_head": values.stride(2),
            "table_row": table.stride(0),
            "shared_heads": g,
            "old_parts": old_parts,
            "scale": scale * LOG2E,
            **old_arguments,
        },
        {
            "group": h // g,
            "d": d,
            "page": page,
            "window": window,
            "alike": keys.stride() == values.stride(),
            "inner": accumulable(query.dtype),
            "rows": max(power(h // g), 16),
            "columns": columns,
            "block": max(power(d), 16),
            **old_constants,
        },
        warps=8 if bits and (query.dtype == torch.float32 or (turning and d > 128)) else 4,
    )
    out, lse, merge = merged(partial, partial_lse, sinks, query.dtype)
    return Plan((out, lse), (*before, split, *after, merge))


@jit
def _split(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    lengths: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    key_block: tl.tensor,
    key_slot: tl.tensor,
    key_head: tl.tensor,
    value_block: tl.tensor,
    value_slot: tl.tensor,
    value_head: tl.tensor,
    table_row: tl.tensor,
    shared_heads: tl.tensor,
    old_parts: tl.tensor,
    scale: tl.tensor,
    old_table: tl.tensor,
    old_counts: tl.tensor,
    old_row: tl.tensor,
    key_codes: tl.tensor,
    value_codes: tl.tensor,
    key_scales: tl.tensor,
    key_lows: tl.tensor,
    value_scales: tl.tensor,
    value_lows: tl.tensor,
    codes_block: tl.tensor,
    group: tl.constexpr,
    d: tl.constexpr,
    page: tl.constexpr,
    window: tl.constexpr,
    alike: tl.constexpr,
    inner: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    bits: tl.constexpr,
    fp8: tl.constexpr,
    turbo: tl.constexpr,
    old_page: tl.constexpr,
    old_columns: tl.constexpr,
) -> None:
    row = (tl.program_id(0) // shared_heads).to(tl.int64)
    shared = (tl.program_id(0) % shared_heads).to(tl.int64)
    part = tl.program_id(1)
    length = tl.load(lengths + row).to(tl.int32)
    lane = tl.arange(0, rows)
    channel = tl.arange(0, block)
    narrow = channel < d
    real = lane < group
    head = shared * group + lane
    q_at = row * query_row + head[:, None] * query_head + channel[None, :]
    q = tl.load(query + q_at, mask=real[:, None] & narrow[None, :], other=0.0).to(inner)

    # the first parts are those of the codes
    if bits > 0 and part < old_parts:
        asking = q
        if turbo:
            # the turned ones stand behind all queries as they are
            behind = tl.num_programs(0).to(tl.int64) * group * d
            asking = tl.load(query + behind + q_at, mask=real[:, None] & narrow[None, :], other=0.0).to(inner)
        best, total, mixed = over_codes(
            asking,
            part,
            old_parts,
            row,
            tl.program_id(0) % shared_heads,
            length,
            shared_heads,
            old_table,
            old_counts,
            old_row,
            key_codes,
            value_codes,
            key_scales,
            key_lows,
            value_scales,
            value_lows,
            codes_block,
            scale,
            d,
            window,
            inner,
            rows,
            block,
            bits,
            fp8,
            turbo,
            old_page,
            old_columns,
        )
    else:
        best, total, mixed = _over_numbers(
            q,
            part - old_parts,
            tl.num_programs(1) - old_parts,
            row,
            shared,
            length,
            keys,
            values,
            table,
            key_block,
            key_slot,
            key_head,
            value_block,
            value_slot,
            value_head,
            table_row,
            scale,
            d,
            page,
            window,
            alike,
            inner,
            rows,
            columns,
            block,
        )
    leave(partial, partial_lse, row * shared_heads * group + head, real, best, total, mixed, d, block)


@jit
def _over_numbers(
    q: tl.tensor,
    part: tl.tensor,
    parts: tl.tensor,
    row: tl.tensor,
    shared: tl.tensor,
    length: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    key_block: tl.tensor,
    key_slot: tl.tensor,
    key_head: tl.tensor,
    value_block: tl.tensor,
    value_slot: tl.tensor,
    value_head: tl.tensor,
    table_row: tl.tensor,
    scale: tl.tensor,
    d: tl.constexpr,
    page: tl.constexpr,
    window: tl.constexpr,
    alike: tl.constexpr,
    inner: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A part of the exact tokens."""
    channel = tl.arange(0, block)
    narrow = channel < d
    best = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, block], tl.float32)
    first = 0
    if window > 0:
        first = tl.maximum(length - window, 0)
    low, high = share_of(part, parts, length - first, columns)
    for at in range(low, high, columns):
        token = first + at + tl.arange(0, columns)
        there = token < first + high
        home = tl.load(table + row * table_row + token // page, mask=there, other=0).to(tl.int64)
        slot = (token % page).to(tl.int64)
        k_at = home * key_block + slot * key_slot + shared * key_head
        k = tl.load(keys + k_at[None, :] + channel[:, None], mask=there[None, :] & narrow[:, None], other=0).to(inner)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        best, total, mixed, weights = weighed(tl.where(there[None, :], scores, float("-inf")), best, total, mixed)
        # strides that are the same are kept once: a scalar register less for each
        v_at = k_at if alike else home * value_block + slot * value_slot + shared * value_head
        v = tl.load(values + v_at[:, None] + channel[None, :], mask=there[:, None] & narrow[None, :], other=0).to(inner)
        mixed += tl.dot(weights.to(inner), v, input_precision="ieee")
    return best, total, mixed


OP = Op(_reference, _plan, CASES, BUILDS)
