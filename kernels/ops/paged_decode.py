"""Attention of one new token per row over a paged cache (PagedAttention, arXiv 2309.06180), its length split among programs.

    s_j = scale q . k_j,   out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink)),   lse = log of that denominator

Token j of row b lies in block table[b, j // 16] at slot j % 16; lengths are true ones, per row. One program takes a part of a row's tokens
for the r = h / g query heads that share a key-value head, so that every key is read once (split-KV, Flash-Decoding); `mmsdk.kernels.parts`
merges the parts by their log-sum-exps. A row of length 0, without a sink, gives 0 and an lse of -inf. `window` keeps the last tokens alone.

An int8 cache holds round(x / scale) with one float32 scale per token and head (`kv_store`). The product with q commutes with the scale, so
codes are multiplied as they are (exact in bfloat16) and scores and weights take the scales.
"""

import torch
from jaxtyping import Float, Int, Int8
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import accumulable, jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant, normal
from mmsdk.kernels.parts import LOG2E, leave, merged, parts_of, share_of, unmerged, weighed

__all__ = ["OP", "paged_decode"]

_WIDEST = 256


def paged_decode(
    query: Float[Tensor, "b h d"],
    keys: Float[Tensor, "blocks page g d"] | Int8[Tensor, "blocks page g d"],
    values: Float[Tensor, "blocks page g d"] | Int8[Tensor, "blocks page g d"],
    table: Int[Tensor, "b most"],
    lengths: Int[Tensor, " b"],
    scale: float,
    window: int = 0,
    sinks: Float[Tensor, " h"] | None = None,
    key_scales: Float[Tensor, "blocks page g"] | None = None,
    value_scales: Float[Tensor, "blocks page g"] | None = None,
) -> tuple[Float[Tensor, "b h d"], Float[Tensor, "b h"]]:
    """The mixtures of values and the log-sum-exp of the scores, float32. What lies beyond a row's length is never read.

    Both scales go with int8 codes, and with nothing else. Raises InputError where they do not, where g does not divide h, and for heads
    wider than 256.
    """
    if keys.shape[2] == 0 or query.shape[1] % keys.shape[2]:
        raise InputError(f"{query.shape[1]} query heads cannot share {keys.shape[2]} key-value heads evenly", item="keys")
    if query.shape[2] > _WIDEST:
        raise InputError(f"heads of {query.shape[2]} channels; at most {_WIDEST}", item="query")
    if {keys.dtype == torch.int8, values.dtype == torch.int8, key_scales is not None, value_scales is not None} not in ({True}, {False}):
        raise InputError("int8 keys and values need both scales, others none", item="key_scales")
    arguments = query, keys, values, table, lengths, scale, window, sinks, key_scales, value_scales
    out, lse = _plan(*arguments).run() if launchable(query) else _reference(*arguments)
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
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> Result:
    h, g = query.shape[1], keys.shape[2]
    place = torch.arange(table.shape[1] * keys.shape[1], device=query.device)
    seen = place < lengths[:, None]
    seen = seen & (place >= lengths[:, None] - window) if window else seen
    k, v = _read(keys, key_scales, table, seen), _read(values, value_scales, table, seen)
    scores = torch.einsum("bgrd,btgd->bgrt", query.float().unflatten(1, (g, h // g)), k).flatten(1, 2) * scale
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    lse = lse if sinks is None else torch.logaddexp(lse, sinks.float())
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    mixed = torch.einsum("bgrt,btgd->bgrd", weights.unflatten(1, (g, h // g)), v).flatten(1, 2)
    return mixed.to(query.dtype), lse


def _read(cache: Tensor, scales: Tensor | None, table: Tensor, seen: Tensor) -> Tensor:
    """The rows' tokens in order, [b, t, g, d], float32; 0 where nothing is seen, whatever the cache holds there."""
    blocks = table.clamp(min=0).long()
    wide = cache[blocks].float()
    wide = wide if scales is None else wide * scales[blocks][..., None]
    return wide.flatten(1, 2).masked_fill(~seen[..., None, None], 0)


def _plan(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    sinks: Tensor | None,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> Plan:
    b, h, d = query.shape
    page, g = keys.shape[1:3]
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise InputError("the channels of a cache lie side by side in memory", item="keys")
    query, table = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, table))
    parts = parts_of(table.shape[1] * page, b * g)
    partial, partial_lse = unmerged(b, h, parts, d, query.device)
    split = Launch(
        _split,
        (b * g, parts),
        {
            "query": query,
            "keys": keys,
            "values": values,
            "key_scales": partial_lse if key_scales is None else key_scales.contiguous(),
            "value_scales": partial_lse if value_scales is None else value_scales.contiguous(),
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
            "scale": scale * LOG2E,
        },
        {
            "group": h // g,
            "d": d,
            "page": page,
            "window": window,
            "coded": key_scales is not None,
            "inner": accumulable(query.dtype),
            "rows": max(power(h // g), 16),
            "columns": 16 if query.dtype == torch.float32 else 32 if d > 64 else 64,
            "block": max(power(d), 16),
        },
    )
    out, lse, merge = merged(partial, partial_lse, sinks, query.dtype)
    return Plan((out, lse), (split, merge))


@jit
def _split(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
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
    scale: tl.tensor,
    group: tl.constexpr,
    d: tl.constexpr,
    page: tl.constexpr,
    window: tl.constexpr,
    coded: tl.constexpr,
    inner: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = (tl.program_id(0) // shared_heads).to(tl.int64)
    shared = (tl.program_id(0) % shared_heads).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    first = 0
    if window > 0:
        first = tl.maximum(length - window, 0)
    low, high = share_of(length - first, columns)
    lane = tl.arange(0, rows)
    channel = tl.arange(0, block)
    narrow = channel < d
    real = lane < group
    head = shared * group + lane
    q_at = row * query_row + head[:, None] * query_head + channel[None, :]
    q = tl.load(query + q_at, mask=real[:, None] & narrow[None, :], other=0.0).to(inner)

    best = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, block], tl.float32)
    for at in range(low, high, columns):
        token = first + at + tl.arange(0, columns)
        there = token < first + high
        home = tl.load(table + row * table_row + token // page, mask=there, other=0).to(tl.int64)
        slot = (token % page).to(tl.int64)
        k_at = home * key_block + slot * key_slot + shared * key_head
        k = tl.load(keys + k_at[None, :] + channel[:, None], mask=there[None, :] & narrow[:, None], other=0).to(inner)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        s_at = (home * page + slot) * shared_heads + shared
        if coded:
            scores = scores * tl.load(key_scales + s_at, mask=there, other=0.0)[None, :]
        best, total, mixed, weights = weighed(tl.where(there[None, :], scores, float("-inf")), best, total, mixed)
        if coded:
            weights = weights * tl.load(value_scales + s_at, mask=there, other=0.0)[None, :]
        v_at = home * value_block + slot * value_slot + shared * value_head
        v = tl.load(values + v_at[:, None] + channel[None, :], mask=there[:, None] & narrow[None, :], other=0).to(inner)
        mixed += tl.dot(weights.to(inner), v, input_precision="ieee")
    leave(partial, partial_lse, row * shared_heads * group + head, real, best, total, mixed, d, block)


def _case(
    name: str, lengths: tuple[int, ...], most: int, h: int, g: int, d: int, window: int = 0, sink: bool = False, coded: bool = False
) -> Case:
    """Blocks of 16 in random order; blocks and slots that no row owns hold NaN, or codes with NaN for a scale."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        b, blocks = len(lengths), len(lengths) * most + 1
        table = torch.randperm(blocks, generator=generator)[: b * most].view(b, most).to(torch.int32)
        owned = (torch.arange(most * 16) < torch.tensor(lengths)[:, None]).view(b, most, 16)
        free = torch.ones(blocks, 16, dtype=torch.bool)
        free[table[owned.any(-1)].long()] = ~owned[owned.any(-1)]
        query = normal(generator, dtype, b, h, d)
        sinks = normal(generator, dtype, h) if sink else None
        if not coded:
            keys, values = (normal(generator, dtype, blocks, 16, g, d).masked_fill_(free[..., None, None], torch.nan) for _ in range(2))
            return query, keys, values, table, torch.tensor(lengths), d**-0.5, window, sinks, None, None
        keys, values = (torch.randint(-127, 128, (blocks, 16, g, d), generator=generator, dtype=torch.int8) for _ in range(2))
        scales = ((torch.rand(blocks, 16, g, generator=generator) / 64).masked_fill_(free[..., None], torch.nan) for _ in range(2))
        return query, keys, values, table, torch.tensor(lengths), d**-0.5, window, sinks, *scales

    return Case(name, make)


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: blocks that 32-bit offsets cannot reach."""
    keys, values = (distant(normal(generator, dtype, 2, 16, 1, 16)) for _ in range(2))
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    return normal(generator, dtype, 1, 2, 16), keys, values, table, torch.tensor([20]), 0.25, 0, None, None, None


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("one token, one head", (1,), 1, 1, 1, 64),
        _case("empty row, group 3, head size 72", (0, 5, 33), 3, 3, 1, 72),
        _case("two parts, group 7, head size 96", (150, 16), 10, 7, 1, 96),
        _case("window and sinks, head size 80", (0, 9, 60), 4, 4, 2, 80, window=10, sink=True),
        _case("int8, two parts, group 2", (137, 0), 9, 4, 2, 64, coded=True),
        _case("group 8", (18,), 2, 8, 1, 64),
        _case("group 24", (18,), 2, 24, 1, 64),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(
        _case("int8, head size 128, group 4", (100, 300), 32, 32, 8, 128, coded=True),
        _case("head size 128, group 4", (100, 300), 32, 32, 8, 128),
        _case("head size 64, group 3", (100, 300), 32, 9, 3, 64),
        _case("head size 256, group 2", (100, 300), 32, 8, 4, 256),
    ),
)
