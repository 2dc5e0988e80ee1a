"""Attention of one new token per row over a paged cache (PagedAttention, arXiv 2309.06180), its length split among programs.

    s_j = scale q . k_j,   out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink)),   lse = log of that denominator

Token j of row b lies in block table[b, j // page] at slot j % page; lengths are true ones, per row. One program takes a part of a row's
tokens for the r = h / g query heads that share a key-value head, so that every key is read once (split-KV, Flash-Decoding);
`mmsdk.kernels.parts` merges the parts by their log-sum-exps. A row without tokens and without a sink gives 0 and an lse of -inf. `window`
keeps the last tokens alone.

A row may have older tokens in front of these, in whole blocks of codes (fp8, int8, int4 or int2, by the rule and in the form of
`mmsdk.kernels.rounding`): keys with a scale and a minimum for each channel of a block, values for each token. They take parts of their own
in the same launch, and are read as codes. What a group shares commutes with both products, so that codes are multiplied as they are, which
all these dtypes hold exactly, and the query and the weights take scales and minima.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import accumulable, jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant, normal
from mmsdk.kernels.parts import LOG2E, leave, merged, parts_of, share_of, unmerged, weighed
from mmsdk.kernels.rounding import LEVELS, Codes, decode, encode, plain

__all__ = ["OP", "Older", "paged_decode", "reads"]

_WIDEST = 256


@dataclass(frozen=True, slots=True)
class Older:
    """Codes [blocks page g p] of a pool, and the blocks of each row: those of its table, as many as `counts` says, full and in order.

    Scales and minima are [blocks 1 g d] of keys and [blocks page g 1] of values.
    """

    bits: str
    keys: Codes
    values: Codes
    table: Int[Tensor, "b most"]
    counts: Int[Tensor, " b"]

    @property
    def page(self) -> int:
        """Tokens of a block."""
        return self.keys.codes.shape[1]

    @property
    def tokens(self) -> Int[Tensor, " b"]:
        """How many each row has."""
        return self.counts * self.page


def reads(bits: str, page: int) -> bool:
    """Whether blocks of so many tokens are read as codes."""
    return bits in LEVELS and page % 16 == 0


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
        known = f"there are {', '.join(LEVELS)} in blocks of a multiple of 16"
        raise InputError(f"blocks of {older.page} tokens as {older.bits}; {known}", item="older")
    arguments = query, keys, values, table, lengths, scale, window, sinks, "" if older is None else older.bits
    pools = _flat(older)
    out, lse = _plan(*arguments, *pools).run() if launchable(query) else _reference(*arguments, *pools)
    return out, lse


def _flat(older: Older | None) -> tuple[Tensor, ...]:
    if older is None:
        return ()
    k, v = older.keys, older.values
    return older.table, older.counts, k.codes, k.scale, k.low, v.codes, v.scale, v.low


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
        past, *both = _unpacked(bits, query.shape[2], query.dtype, *older)
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


def _unpacked(bits: str, d: int, dtype: torch.dtype, table: Tensor, counts: Tensor, *pools: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which of the older tokens there are, [b, t], and their keys and values, [b, t, g, d], float32."""
    blocks = table.clamp(min=0).long()
    found = (Codes(*(pool[blocks] for pool in pools[start : start + 3])) for start in (0, 3))
    k, v = (decode(codes, bits, d, dtype).float().flatten(1, 2) for codes in found)
    return torch.arange(k.shape[1], device=k.device) < counts[:, None] * pools[0].shape[1], k, v


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
    old_arguments, old_constants = _of_codes(bits, partial_lse, columns, *older)
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
        warps=8 if bits and query.dtype == torch.float32 else 4,
    )
    out, lse, merge = merged(partial, partial_lse, sinks, query.dtype)
    return Plan((out, lse), (split, merge))


def _of_codes(bits: str, nothing: Tensor, columns: int, *older: Tensor) -> tuple[dict[str, Tensor | int | float], dict[str, object]]:
    """What the kernel is told of older tokens, and how it is compiled for them; without any it reads none of these."""
    table, counts, *pools = older if bits else (nothing,) * 8
    codes = _alike(pools[0], pools[3])
    of_keys, of_values = ([pools[place].contiguous() for place in pair] for pair in ((1, 2), (4, 5)))
    arguments: dict[str, Tensor | int | float] = {"old_table": table, "old_counts": counts, "old_row": table.stride(0)}
    arguments |= {"key_codes": codes[0], "value_codes": codes[1], "key_scales": of_keys[0], "key_lows": of_keys[1]}
    arguments |= {"value_scales": of_values[0], "value_lows": of_values[1]}
    arguments["codes_block"] = codes[0].stride(0)
    page = pools[0].shape[1] if bits else columns
    # a tile lies within one block, whose scales are then read once
    tile = next(size for size in (columns, 32, 16) if size <= columns and page % size == 0)
    return arguments, {"bits": LEVELS.get(bits, 0), "fp8": bits == "fp8", "old_page": page, "old_columns": tile}


def _alike(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Two pools as far from one block to the next, as pools are that were made together; a block is one piece of memory."""
    if one.stride(0) == other.stride(0) and one[0].is_contiguous() and other[0].is_contiguous():
        return one, other
    return one.contiguous(), other.contiguous()


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

    if bits > 0:
        # the first parts are those of the codes
        if part < old_parts:
            best, total, mixed = _over_codes(
                q,
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
    else:
        best, total, mixed = _over_numbers(
            q,
            part,
            tl.num_programs(1),
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


@jit
def _over_codes(
    q: tl.tensor,
    part: tl.tensor,
    parts: tl.tensor,
    row: tl.tensor,
    shared_head: tl.tensor,
    length: tl.tensor,
    shared_heads: tl.tensor,
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
    scale: tl.tensor,
    d: tl.constexpr,
    window: tl.constexpr,
    inner: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    bits: tl.constexpr,
    fp8: tl.constexpr,
    old_page: tl.constexpr,
    old_columns: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A part of the tokens in front of them."""
    channel = tl.arange(0, block)
    narrow = channel < d
    wide = q.to(tl.float32)
    best = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, block], tl.float32)
    tokens = tl.load(old_counts + row).to(tl.int32) * old_page
    start = 0
    if window > 0:
        start = tl.minimum(tl.maximum(tokens + length - window, 0), tokens)
    base = start // old_columns * old_columns
    low, high = share_of(part, parts, tokens - base, old_columns)
    byte = channel * bits // 8
    shift = (channel * bits % 8).to(tl.uint8)
    packed: tl.constexpr = (d * bits + 7) // 8
    for at in range(base + low, base + high, old_columns):
        token = at + tl.arange(0, old_columns)
        home = tl.load(old_table + row * old_row + at // old_page).to(tl.int64)
        # of a block, in which nothing is 32 bits away
        slot = (token % old_page) * shared_heads + shared_head
        code = tl.load(key_codes + home * codes_block + (slot[None, :] * packed + byte[:, None]), mask=narrow[:, None], other=0)
        if bits < 8:
            code = (code >> shift[:, None]) & ((1 << bits) - 1)
        scale_at = home * shared_heads * d + (shared_head * d + channel)
        step = tl.load(key_scales + scale_at, mask=narrow, other=0.0).to(tl.float32)
        least = tl.load(key_lows + scale_at, mask=narrow, other=0.0).to(tl.float32)
        # what a channel's tokens share commutes with the product: codes are multiplied as they are, exact in any dtype
        scores = tl.dot((wide * step[None, :]).to(inner), plain(code, fp8, inner), input_precision="ieee")
        if not fp8:
            scores += tl.sum(wide * least[None, :], 1)[:, None]
        scores = scores * scale
        if window > 0:
            scores = tl.where((token >= start)[None, :], scores, float("-inf"))
        best, total, mixed, weights = weighed(scores, best, total, mixed)
        code = tl.load(value_codes + home * codes_block + (slot[:, None] * packed + byte[None, :]), mask=narrow[None, :], other=0)
        if bits < 8:
            code = (code >> shift[None, :]) & ((1 << bits) - 1)
        step = tl.load(value_scales + home * shared_heads * old_page + slot).to(tl.float32)
        least = tl.load(value_lows + home * shared_heads * old_page + slot).to(tl.float32)
        mixed += tl.dot((weights * step[None, :]).to(inner), plain(code, fp8, inner), input_precision="ieee")
        if not fp8:
            mixed += tl.sum(weights * least[None, :], 1)[:, None]
    return best, total, mixed


def _case(
    name: str,
    lengths: tuple[int, ...],
    most: int,
    h: int,
    g: int,
    d: int,
    window: int = 0,
    sink: bool = False,
    bits: str = "",
    old: tuple[int, ...] = (),
    page: int = 16,
) -> Case:
    """Blocks in random order, `old` of them as codes in front; blocks and slots that no row owns hold NaN, or NaN for a scale."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        b, blocks = len(lengths), len(lengths) * most + 1
        table = torch.randperm(blocks, generator=generator)[: b * most].view(b, most).to(torch.int32)
        owned = (torch.arange(most * page) < torch.tensor(lengths)[:, None]).view(b, most, page)
        free = torch.ones(blocks, page, dtype=torch.bool)
        free[table[owned.any(-1)].long()] = ~owned[owned.any(-1)]
        query = normal(generator, dtype, b, h, d)
        sinks = normal(generator, dtype, h) if sink else None
        keys, values = (normal(generator, dtype, blocks, page, g, d).masked_fill_(free[..., None, None], torch.nan) for _ in range(2))
        older = _rounded(generator, dtype, bits, old, page, g, d) if bits else ()
        return query, keys, values, table, torch.tensor(lengths), d**-0.5, window, sinks, bits, *older

    return Case(name, make)


def _rounded(generator: torch.Generator, dtype: torch.dtype, bits: str, counts: tuple[int, ...], page: int, g: int, d: int) -> Arguments:
    b, most, blocks = len(counts), max(counts), len(counts) * max(counts) + 1
    table = torch.randperm(blocks, generator=generator)[: b * most].view(b, most)
    strange = torch.ones(blocks, dtype=torch.bool)
    strange[table[torch.arange(most) < torch.tensor(counts)[:, None]]] = False
    # blocks of other numbers than the exact ones, with a channel that is large for every token
    keys, values = (normal(generator, dtype, blocks, page, g, d) * 0.7 for _ in range(2))
    keys[..., 0] += 4
    pools = list[Tensor]()
    for x, along in ((keys, 1), (values, 3)):
        found = encode(x, along, bits)
        pools += found.codes, *(part.masked_fill(strange[:, None, None, None], torch.nan) for part in (found.scale, found.low))
    return table, torch.tensor(counts), *pools


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: blocks that 32-bit offsets cannot reach."""
    keys, values = (distant(normal(generator, dtype, 2, 16, 1, 16)) for _ in range(2))
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    return normal(generator, dtype, 1, 2, 16), keys, values, table, torch.tensor([20]), 0.25, 0, None, ""


def _distant_codes(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: the same of codes and of their scales."""
    keys, values = (normal(generator, dtype, 2, 16, 1, 16) for _ in range(2))
    parts = [encode(x, along, "int4") for x, along in ((keys, 1), (values, 3))]
    pools = [distant(x) for part in parts for x in (part.codes, part.scale, part.low)]
    table = torch.tensor([[1, 0]])
    return (
        normal(generator, dtype, 1, 2, 16),
        keys,
        values,
        table,
        torch.tensor([0]),
        0.25,
        0,
        None,
        "int4",
        table,
        torch.tensor([2]),
        *pools,
    )


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("one token, one head", (1,), 1, 1, 1, 64),
        _case("empty row, group 3, head size 72", (0, 5, 33), 3, 3, 1, 72),
        _case("two parts, group 7, head size 96", (150, 16), 10, 7, 1, 96),
        _case("window and sinks, head size 80", (0, 9, 60), 4, 4, 2, 80, window=10, sink=True),
        _case("group 8", (18,), 2, 8, 1, 64),
        _case("group 24", (18,), 2, 24, 1, 64),
        _case("int8 behind two parts, group 3, head size 72", (137, 0), 9, 3, 1, 72, bits="int8", old=(9, 2)),
        _case("int8, empty rows, group 1, head size 96", (0, 0, 5), 1, 2, 2, 96, bits="int8", old=(0, 3, 0)),
        _case("fp8, group 24, head size 80", (18, 7), 2, 24, 1, 80, bits="fp8", old=(3, 1)),
        _case("fp8, nothing exact, head size 256", (0,), 1, 1, 1, 256, bits="fp8", old=(2,)),
        _case("int4, group 7, window and sinks", (9, 40, 0), 3, 7, 1, 64, window=45, sink=True, bits="int4", old=(3, 1, 5)),
        _case("int4, an odd head, a window of what is exact", (30,), 2, 2, 1, 19, window=20, bits="int4", old=(2,)),
        _case("int2, pages of 32", (33, 1), 2, 2, 1, 64, bits="int2", old=(1, 3), page=32),
        Case("offsets beyond 2**31", _distant),
        Case("codes beyond 2**31", _distant_codes),
    ),
    builds=(
        _case("head size 128, group 4", (100, 300), 32, 32, 8, 128),
        _case("head size 64, group 3", (100, 300), 32, 9, 3, 64),
        _case("head size 256, group 2", (100, 300), 32, 8, 4, 256),
        _case("int8, head size 128, group 4", (100, 300), 32, 32, 8, 128, bits="int8", old=(4, 9), page=32),
        _case("fp8, head size 128, group 4", (100, 300), 32, 32, 8, 128, bits="fp8", old=(4, 9), page=32),
        _case("int4, head size 128, group 4", (100, 300), 32, 32, 8, 128, bits="int4", old=(4, 9), page=32),
        _case("int4, head size 64, group 3, blocks of 16", (100, 300), 32, 9, 3, 64, bits="int4", old=(4, 9)),
        _case("fp8, head size 256, group 2", (100, 300), 32, 8, 4, 256, bits="fp8", old=(4, 9), page=32),
    ),
)
