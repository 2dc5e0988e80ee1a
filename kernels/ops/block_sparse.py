"""Block-sparse attention: every block of queries reads the blocks of keys on its own list, and no others.

    out_i = sum_j exp(scale q_i . k_j) v_j / sum_j exp(scale q_i . k_j) + r_i,   lse_i = log sum_j exp(scale q_i . k_j)

with j over the tokens of the listed blocks: what every sparse attention of video diffusion comes down to once its masks are chosen (block
lists as in FlexAttention, arXiv 2412.05496; running maximum as in FlashAttention-2, arXiv 2307.08691). Lists differ by head and by row in
content and length. A row with an empty list gives 0 and an lse of -inf. The residual r, where there is one, is added before rounding.

Blocks are even, of a fixed size with a ragged last one, or lie between given starts, so that clusters and tiles cut at an edge need no
padding. Programs take the rows in the order of `row_order`, which changes which of them run together and no bit of what they compute.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import accumulable, jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant, normal

__all__ = ["OP", "block_sparse", "listed"]

_WIDEST = 256
_SIZES = (16, 32, 64, 128)
_LOG2E = 1.4426950408889634


def block_sparse(
    query: Float[Tensor, "b h s d"],
    keys: Float[Tensor, "b g t d"],
    values: Float[Tensor, "b g t d"],
    counts: Int[Tensor, "b h rows"],
    blocks: Int[Tensor, "b h rows most"],
    sizes: tuple[int, int],
    scale: float,
    query_starts: Int[Tensor, "b h rows1"] | None = None,
    key_starts: Int[Tensor, "b g columns1"] | None = None,
    row_order: Int[Tensor, "b h rows"] | None = None,
    residual: Float[Tensor, "b h s d"] | None = None,
) -> tuple[Float[Tensor, "b h s d"], Float[Tensor, "b h s"]]:
    """The mixtures of values, and the log-sum-exp of the scores in float32, the residual not counted in it.

    Row r of a head reads blocks[..., r, :counts[..., r]], each of them once; a number that is no block is passed over. `sizes` are the most
    tokens of a block of queries and of keys: 16, 32, 64 or 128. Without starts, block i holds the tokens from i * size on; with them those
    from starts[i] to starts[i + 1], which run from 0 to the length. `row_order` is a permutation of the rows of every head. h / g query
    heads share a key-value head, in order. Raises InputError for sizes, lengths and heads that do not fit, and heads wider than 256.
    """
    h, s, d = query.shape[1:]
    g, t = keys.shape[1:3]
    if g == 0 or h % g:
        raise InputError(f"{h} query heads cannot share {g} key-value heads evenly", item="keys")
    if d > _WIDEST:
        raise InputError(f"heads of {d} channels; at most {_WIDEST}", item="query")
    if not set(sizes) <= set(_SIZES):
        raise InputError(f"blocks of {sizes[0]} queries and {sizes[1]} keys; there are {', '.join(map(str, _SIZES))}", item="sizes")
    rows = -(-s // sizes[0]) if query_starts is None else query_starts.shape[2] - 1
    if counts.shape[2] != rows:
        raise InputError(f"lists of {counts.shape[2]} rows for {s} queries, which make {rows}; make them for this length", item="counts")
    if key_starts is None and blocks.shape[3] > -(-t // sizes[1]):
        raise InputError(f"lists of {blocks.shape[3]} blocks; {t} keys make {-(-t // sizes[1])}; make them for this length", item="blocks")
    arguments = query, keys, values, counts, blocks, sizes, scale, query_starts, key_starts, row_order, residual
    out, lse = _plan(*arguments).run() if launchable(query) else _reference(*arguments)
    return out, lse


def listed(mask: Bool[Tensor, "b h rows columns"]) -> tuple[Int[Tensor, "b h rows"], Int[Tensor, "b h rows columns"]]:
    """The lists of a block mask, int32: how many blocks each row reads, and which, ascending, followed by those that it does not."""
    order = mask.view(torch.uint8).sort(dim=-1, descending=True, stable=True).indices
    return mask.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)


def _reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    counts: Tensor,
    blocks: Tensor,
    sizes: tuple[int, int],
    scale: float,
    query_starts: Tensor | None,
    key_starts: Tensor | None,
    row_order: Tensor | None,
    residual: Tensor | None,
) -> Result:
    h, g, t = query.shape[1], keys.shape[1], keys.shape[2]
    columns = -(-t // sizes[1]) if key_starts is None else key_starts.shape[2] - 1
    real = (torch.arange(blocks.shape[3], device=blocks.device) < counts[..., None]) & (blocks >= 0) & (blocks < columns)
    chosen = torch.zeros(*counts.shape, columns + 1, dtype=torch.bool, device=blocks.device)
    chosen = chosen.scatter_(3, blocks.where(real, columns).long(), True)[..., :columns]
    row, column = _block_of(query, sizes[0], query_starts), _block_of(keys, sizes[1], key_starts).repeat_interleave(h // g, 1)
    seen = chosen.gather(2, row[..., None].expand(-1, -1, -1, columns)).gather(3, column[:, :, None].expand(*row.shape, t))
    scores = torch.einsum("bgrsd,bgtd->bgrst", query.float().unflatten(1, (g, h // g)), keys.float()).flatten(1, 2) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    # 0 in place of -inf: all scores of such a row are -inf, and their exponentials 0
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    mixed = torch.einsum("bgrst,bgtd->bgrsd", weights.unflatten(1, (g, h // g)), values.float()).flatten(1, 2)
    return (mixed if residual is None else mixed + residual.float()).to(query.dtype), lse


def _block_of(x: Tensor, size: int, starts: Tensor | None) -> Tensor:
    """The block in which each token stands, [b, heads, tokens]."""
    token = torch.arange(x.shape[2], device=x.device).expand(x.shape[:3])
    return (
        token // size
        if starts is None
        else torch.searchsorted(starts[..., 1:].contiguous(), token.to(starts.dtype).contiguous(), right=True)
    )


def _plan(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    counts: Tensor,
    blocks: Tensor,
    sizes: tuple[int, int],
    scale: float,
    query_starts: Tensor | None,
    key_starts: Tensor | None,
    row_order: Tensor | None,
    residual: Tensor | None,
) -> Plan:
    b, h, s, d = query.shape
    g, t = keys.shape[1:3]
    query, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, keys, values))
    out = torch.empty(b, h, s, d, dtype=query.dtype, device=query.device)
    lse = torch.empty(b, h, s, dtype=torch.float32, device=query.device)
    added = None if residual is None else residual if residual.stride(-1) == 1 else residual.contiguous()
    block = max(power(d), 16)
    rows, columns, warps = _tile(d, sizes, query.dtype)
    arguments: dict[str, Tensor | int | float] = {
        "query": query,
        "keys": keys,
        "values": values,
        "counts": counts.contiguous(),
        "blocks": blocks.contiguous(),
        "query_starts": lse if query_starts is None else query_starts.contiguous(),
        "key_starts": lse if key_starts is None else key_starts.contiguous(),
        "row_order": lse if row_order is None else row_order.contiguous(),
        "residual": lse if added is None else added,
        "out": out,
        "lse": lse,
        **_strides("query", query),
        **_strides("key", keys),
        **_strides("value", values),
        **_strides("residual", query if added is None else added),
        "heads": h,
        "lists": counts.shape[2],
        "most": blocks.shape[3],
        "length": s,
        "entries": t,
        "key_blocks": -(-t // sizes[1]) if key_starts is None else key_starts.shape[2] - 1,
        "scale": scale * _LOG2E,
    }
    constants = {
        "group": h // g,
        "d": d,
        "query_size": sizes[0],
        "key_size": sizes[1],
        "rows": rows,
        "columns": columns,
        "block": block,
        "query_even": query_starts is None,
        "key_even": key_starts is None,
        "ordered": row_order is not None,
        "added": added is not None,
        "inner": accumulable(query.dtype),
    }
    programs = b * h * counts.shape[2] * (sizes[0] // rows)
    return Plan((out, lse), (Launch(_kernel, (programs,), arguments, constants, warps),))


def _strides(name: str, x: Tensor) -> dict[str, int]:
    return {f"{name}_batch": x.stride(0), f"{name}_head": x.stride(1), f"{name}_token": x.stride(2)}


def _tile(d: int, sizes: tuple[int, int], dtype: torch.dtype) -> tuple[int, int, int]:
    """Queries and keys of a tile, each a part of its block, and warps: the largest that spill on none of the targets."""
    if dtype == torch.float32:
        rows, columns, warps = (32, 32, 4) if d <= 64 else (16, 16, 4)
    elif d <= 128:
        rows, columns, warps = 128, 32, 8
    else:
        rows, columns, warps = 32, 32, 4
    if sizes[0] < rows:
        # channels that fill no whole tile cost registers
        rows, warps = sizes[0], 8 if sizes[0] == 64 and power(d) > max(d, 64) else 4
    return rows, min(columns, sizes[1]), warps


@jit
def _kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    counts: tl.tensor,
    blocks: tl.tensor,
    query_starts: tl.tensor,
    key_starts: tl.tensor,
    row_order: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    query_batch: tl.tensor,
    query_head: tl.tensor,
    query_token: tl.tensor,
    key_batch: tl.tensor,
    key_head: tl.tensor,
    key_token: tl.tensor,
    value_batch: tl.tensor,
    value_head: tl.tensor,
    value_token: tl.tensor,
    residual_batch: tl.tensor,
    residual_head: tl.tensor,
    residual_token: tl.tensor,
    heads: tl.tensor,
    lists: tl.tensor,
    most: tl.tensor,
    length: tl.tensor,
    entries: tl.tensor,
    key_blocks: tl.tensor,
    scale: tl.tensor,
    group: tl.constexpr,
    d: tl.constexpr,
    query_size: tl.constexpr,
    key_size: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    query_even: tl.constexpr,
    key_even: tl.constexpr,
    ordered: tl.constexpr,
    added: tl.constexpr,
    inner: tl.constexpr,
) -> None:
    parts: tl.constexpr = query_size // rows
    pieces: tl.constexpr = key_size // columns
    part = tl.program_id(0) % parts
    slot = (tl.program_id(0) // parts).to(tl.int64)
    owner = slot // lists
    batch = owner // heads
    head = owner % heads
    shared = head // group
    row = slot % lists
    if ordered:
        row = tl.load(row_order + slot).to(tl.int64)
    at = owner * lists + row

    if query_even:
        first = row * query_size
        last = tl.minimum(first + query_size, length)
    else:
        begin_at = query_starts + owner * (lists + 1) + row
        first = tl.load(begin_at).to(tl.int64)
        last = tl.load(begin_at + 1).to(tl.int64)
    first += part * rows
    if first >= last:
        return

    token = first + tl.arange(0, rows)
    channel = tl.arange(0, block)
    real = token < last
    narrow = channel < d
    whole = real[:, None] & narrow[None, :]
    q_at = batch * query_batch + head * query_head + token[:, None] * query_token + channel[None, :]
    q = tl.load(query + q_at, mask=whole, other=0.0).to(inner)
    k_base = keys + batch * key_batch + shared * key_head
    v_base = values + batch * value_batch + shared * value_head
    start_base = key_starts + (batch * (heads // group) + shared) * (key_blocks + 1)

    best = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, block], tl.float32)
    count = tl.load(counts + at).to(tl.int32)
    for step in range(count * pieces):
        listed_block = tl.load(blocks + at * most + step // pieces).to(tl.int64)
        known = (listed_block >= 0) & (listed_block < key_blocks)
        if key_even:
            begin = listed_block * key_size
            end = tl.where(known, tl.minimum(begin + key_size, entries), begin)
        else:
            begin = tl.load(start_base + listed_block, mask=known, other=0).to(tl.int64)
            end = tl.load(start_base + listed_block + 1, mask=known, other=0).to(tl.int64)
        entry = begin + (step % pieces) * columns + tl.arange(0, columns)
        there = entry < end
        k = tl.load(k_base + entry[None, :] * key_token + channel[:, None], mask=there[None, :] & narrow[:, None], other=0.0).to(inner)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        peak = tl.maximum(best, tl.max(scores, 1))
        # where nothing was seen yet the peak is -inf, and -inf less -inf no number
        anchor = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(best - anchor)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(v_base + entry[:, None] * value_token + channel[None, :], mask=there[:, None] & narrow[None, :], other=0.0).to(inner)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(inner), v, input_precision="ieee")
        best = peak

    alive = total > 0
    divisor = tl.where(alive, total, 1.0)
    result = mixed / divisor[:, None]
    if added:
        r_at = batch * residual_batch + head * residual_head + token[:, None] * residual_token + channel[None, :]
        result += tl.load(residual + r_at, mask=whole, other=0.0).to(tl.float32)
    place = owner * length + token
    tl.store(out + place[:, None] * d + channel[None, :], result.to(out.dtype.element_ty), mask=whole)
    tl.store(lse + place, tl.where(alive, (best + tl.log2(divisor)) * 0.6931471805599453, float("-inf")), mask=real)


def _case(
    name: str,
    lengths: tuple[int, int],
    h: int,
    g: int,
    d: int,
    sizes: tuple[int, int] = (16, 16),
    b: int = 1,
    uneven: bool = False,
    ordered: bool = False,
    residual: bool = False,
) -> Case:
    """Half of all blocks, drawn; the first row of the last head reads none, and its last one all."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        s, t = lengths
        query = normal(generator, dtype, b, h, s, d)
        keys, values = (normal(generator, dtype, b, g, t, d) for _ in range(2))
        query_starts = _drawn_starts(generator, b, h, s, sizes[0]) if uneven else None
        key_starts = _drawn_starts(generator, b, g, t, sizes[1]) if uneven else None
        rows, columns = (
            -(-length // size) if starts is None else starts.shape[2] - 1
            for length, size, starts in zip(lengths, sizes, (query_starts, key_starts), strict=True)
        )
        mask = torch.rand(b, h, rows, columns, generator=generator) < 0.5
        mask[:, -1, 0], mask[:, -1, -1] = False, True
        orders = torch.rand(b, h, rows, generator=generator).argsort(-1).to(torch.int32)
        added = normal(generator, dtype, b, h, s, d)
        counts, blocks = listed(mask)
        order, plus = orders if ordered else None, added if residual else None
        return query, keys, values, counts, blocks, sizes, d**-0.5, query_starts, key_starts, order, plus

    return Case(name, make)


def _drawn_starts(generator: torch.Generator, b: int, heads: int, length: int, size: int) -> Tensor:
    """Blocks of 0 to `size` tokens from 0 to the length, as many in every head; the last ones are empty in most."""
    steps = torch.randint(0, size + 1, (b, heads, 4 * -(-length // size) + 4), generator=generator)
    starts = torch.cat((torch.zeros(b, heads, 1, dtype=torch.int64), steps.cumsum(-1)), -1).clamp_(max=length)
    starts[..., -1] = length
    return starts.to(torch.int32)


def _strangers(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """Numbers on the lists that are no blocks, in int64; nothing is read there."""
    query, keys, values = (normal(generator, dtype, 1, 2, n, 16) for n in (40, 50, 50))
    blocks = torch.tensor([[3, -1, 0], [4, 2, 1], [7, 9, -5]])[None, None].expand(1, 2, 3, 3)
    return query, keys, values, torch.tensor([3, 2, 3]).expand(1, 2, 3), blocks, (16, 16), 0.25, None, None, None, None


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09 and KA-10: tokens that 32-bit offsets cannot reach, of queries, keys and values alike."""
    query, keys, values = (distant(normal(generator, dtype, 2, 16))[None, None] for _ in range(3))
    counts, blocks = listed(torch.ones(1, 1, 1, 1, dtype=torch.bool))
    return query, keys, values, counts, blocks, (16, 16), 0.25, None, None, None, None


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("one token", (1, 1), 1, 1, 64),
        _case("ragged tails, group 3, head size 72", (37, 70), 3, 1, 72),
        _case("two rows of the batch, group 7, head size 96", (20, 33), 7, 1, 96, b=2),
        _case("blocks 64 by 64, head size 80", (129, 200), 1, 1, 80, (64, 64)),
        _case("blocks 128 by 64, ordered", (200, 127), 2, 2, 16, (128, 64), ordered=True),
        _case("blocks 64 by 128, residual", (63, 129), 2, 1, 16, (64, 128), residual=True),
        _case("blocks 32 by 16, ordered, residual", (70, 40), 2, 1, 64, (32, 16), ordered=True, residual=True),
        _case("uneven blocks, some empty, ordered", (60, 75), 4, 2, 16, (16, 32), b=2, uneven=True, ordered=True),
        _case("uneven blocks of 64, residual", (100, 90), 2, 2, 24, (64, 64), uneven=True, residual=True),
        _case("head size 256", (17, 33), 2, 1, 256),
        _case("group 8", (18, 20), 8, 1, 64),
        _case("group 24", (18, 20), 24, 1, 64),
        Case("numbers that are no blocks", _strangers),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(
        _case("head size 128, blocks 128 by 128, ordered, residual", (512, 512), 8, 8, 128, (128, 128), ordered=True, residual=True),
        _case("head size 128, blocks 128 by 64", (512, 512), 8, 8, 128, (128, 64)),
        _case("head size 128, blocks 64 by 64, uneven, ordered", (512, 512), 8, 8, 128, (64, 64), uneven=True, ordered=True),
        _case("head size 64, blocks 128 by 64, group 2", (512, 512), 8, 4, 64, (128, 64), ordered=True),
        _case("head size 64, blocks 64 by 64", (512, 512), 8, 8, 64, (64, 64)),
        _case("head size 72, blocks 64 by 64", (512, 512), 16, 16, 72, (64, 64)),
        _case("head size 256, blocks 64 by 64, group 2", (512, 512), 8, 4, 256, (64, 64), ordered=True),
    ),
)
