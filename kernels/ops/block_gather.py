"""Decode attention over a choice of blocks: one new token of each row reads the blocks on its list, and no others.

    s_j = scale q . k_j + bias_c,   out = sum_j exp(s_j) v_j / sum_j exp(s_j),   lse = log sum_j exp(s_j)

with j over the real tokens of the listed blocks c. All query heads of a key-value head read one list. The bias is one number for each
block: 0 where pages are chosen (Quest, arXiv 2406.10774), minus the logarithm of a block's chance where they are drawn (SANTA++, of which
SANTA, arXiv 2605.01910, is the first part). A row whose list holds no real token gives 0 and an lse of -inf, so that what several memories
give merges by its lse.

Block i of a row holds its m tokens from `starts` + i m on, as far as there are any, so that rows may begin in different columns; `valid`
says which columns hold a token. A number that is no block is passed over, so that lists may be of unequal length. A list is split into
parts, each with a program of its own, as in `mmsdk.kernels.parts`.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import accumulable, jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant, normal
from mmsdk.kernels.parts import LOG2E, leave, merged, parts_of, share_of, unmerged, weighed

__all__ = ["OP", "block_gather"]

_WIDEST = 256


def block_gather(
    query: Float[Tensor, "b h d"],
    keys: Float[Tensor, "b g t d"],
    values: Float[Tensor, "b g t d"],
    index: Int[Tensor, "b g k"],
    bias: Float[Tensor, "b g k"],
    valid: Bool[Tensor, "b t"],
    starts: Int[Tensor, " b"],
    size: int,
    scale: float,
) -> tuple[Float[Tensor, "b h d"], Float[Tensor, "b h"]]:
    """The mixtures of values and the log-sum-exp of the scores, float32. The k listed blocks of `size` tokens are read, each of them once.

    h / g query heads share a key-value head, in order; starts are not below 0. Raises InputError where g does not divide h, for heads wider
    than 256 and blocks of no token.
    """
    if keys.shape[1] == 0 or query.shape[1] % keys.shape[1]:
        raise InputError(f"{query.shape[1]} query heads cannot share {keys.shape[1]} key-value heads evenly", item="keys")
    if query.shape[2] > _WIDEST:
        raise InputError(f"heads of {query.shape[2]} channels; at most {_WIDEST}", item="query")
    if size < 1:
        raise InputError(f"it is {size}, it must be at least 1", item="size")
    arguments = query, keys, values, index, bias, valid, starts, size, scale
    out, lse = _plan(*arguments).run() if launchable(query) else _reference(*arguments)
    return out, lse


def _reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    bias: Tensor,
    valid: Tensor,
    starts: Tensor,
    size: int,
    scale: float,
) -> Result:
    b, g, t, _ = keys.shape
    if t == 0:
        return torch.zeros_like(query), torch.full(query.shape[:2], -torch.inf, device=query.device)
    # no number of a block is so large that its columns would be beyond 64 bits
    known = (index >= 0) & (index <= t // size)
    first = starts[:, None, None] + index.where(known, 0).long() * size
    column = first[..., None] + torch.arange(size, device=index.device)
    inside = known[..., None] & (column < t)
    column = column.where(inside, 0).flatten(2)
    rows, heads = torch.arange(b, device=index.device)[:, None, None], torch.arange(g, device=index.device)[:, None]
    seen = inside.flatten(2) & valid[rows, column]
    # what no token owns may hold anything, NaN as well
    k, v = (x[rows, heads, column].float().masked_fill(~seen[..., None], 0) for x in (keys, values))
    scores = query.float().unflatten(1, (g, -1)) @ k.transpose(2, 3) * scale
    scores = scores + bias.float().masked_fill(~known, 0).repeat_interleave(size, 2)[:, :, None]
    scores = scores.masked_fill(~seen[:, :, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return (weights @ v).flatten(1, 2).to(query.dtype), lse.flatten(1)


def _plan(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    bias: Tensor,
    valid: Tensor,
    starts: Tensor,
    size: int,
    scale: float,
) -> Plan:
    b, h, d = query.shape
    g, t = keys.shape[1:3]
    query, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, keys, values))
    parts = parts_of(index.shape[2] * size, b * g)
    partial, partial_lse = unmerged(b, h, parts, d, query.device)
    split = Launch(
        _split,
        (b * g, parts),
        {
            "query": query,
            "keys": keys,
            "values": values,
            "index": index.contiguous(),
            "bias": bias.contiguous(),
            "valid": valid.contiguous().view(torch.uint8),
            "starts": starts.contiguous(),
            "partial": partial,
            "partial_lse": partial_lse,
            "query_row": query.stride(0),
            "query_head": query.stride(1),
            "key_row": keys.stride(0),
            "key_head": keys.stride(1),
            "key_token": keys.stride(2),
            "value_row": values.stride(0),
            "value_head": values.stride(1),
            "value_token": values.stride(2),
            "shared_heads": g,
            "entries": t,
            "listed": index.shape[2],
            "scale": scale * LOG2E,
        },
        {
            "group": h // g,
            "d": d,
            "size": size,
            "inner": accumulable(query.dtype),
            "rows": max(power(h // g), 16),
            "columns": 16 if query.dtype == torch.float32 or d > 128 else 32,
            "block": max(power(d), 16),
        },
    )
    out, lse, merge = merged(partial, partial_lse, None, query.dtype)
    return Plan((out, lse), (split, merge))


@jit
def _split(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    index: tl.tensor,
    bias: tl.tensor,
    valid: tl.tensor,
    starts: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    key_token: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    value_token: tl.tensor,
    shared_heads: tl.tensor,
    entries: tl.tensor,
    listed: tl.tensor,
    scale: tl.tensor,
    group: tl.constexpr,
    d: tl.constexpr,
    size: tl.constexpr,
    inner: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
) -> None:
    owner = tl.program_id(0).to(tl.int64)
    row = owner // shared_heads
    shared = owner % shared_heads
    low, high = share_of(tl.program_id(1), tl.num_programs(1), listed * size, columns)
    lane = tl.arange(0, rows)
    channel = tl.arange(0, block)
    narrow = channel < d
    real = lane < group
    head = shared * group + lane
    q_at = row * query_row + head[:, None] * query_head + channel[None, :]
    q = tl.load(query + q_at, mask=real[:, None] & narrow[None, :], other=0.0).to(inner)
    k_base = keys + row * key_row + shared * key_head
    v_base = values + row * value_row + shared * value_head
    start = tl.load(starts + row).to(tl.int64)

    best = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, block], tl.float32)
    for at in range(low, high, columns):
        token = at + tl.arange(0, columns)
        within = token < high
        entry = owner * listed + token // size
        home = tl.load(index + entry, mask=within, other=-1).to(tl.int64)
        column = start + home * size + token % size
        inside = within & (home >= 0) & (column < entries)
        there = inside & (tl.load(valid + row * entries + column, mask=inside, other=0) != 0)
        k = tl.load(k_base + column[None, :] * key_token + channel[:, None], mask=there[None, :] & narrow[:, None], other=0.0).to(inner)
        added = tl.load(bias + entry, mask=there, other=0.0).to(tl.float32) * 1.4426950408889634
        scores = tl.dot(q, k, input_precision="ieee") * scale + added[None, :]
        best, total, mixed, weights = weighed(tl.where(there[None, :], scores, float("-inf")), best, total, mixed)
        v = tl.load(v_base + column[:, None] * value_token + channel[None, :], mask=there[:, None] & narrow[None, :], other=0.0).to(inner)
        mixed += tl.dot(weights.to(inner), v, input_precision="ieee")
    leave(partial, partial_lse, row * shared_heads * group + head, real, best, total, mixed, d, block)


def _case(name: str, lengths: tuple[int, ...], t: int, size: int, h: int, g: int, d: int, listed: int) -> Case:
    """Rows of unequal length that end in the last column; lists in random order with -1 among them; what no token owns holds NaN."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        b, starts = len(lengths), t - torch.tensor(lengths)
        valid = torch.arange(t) >= starts[:, None]
        query = normal(generator, dtype, b, h, d)
        keys, values = (normal(generator, dtype, b, g, t, d).masked_fill_(~valid[:, None, :, None], torch.nan) for _ in range(2))
        index = torch.rand(b, g, -(-t // size), generator=generator).argsort(-1)[..., :listed]
        index = index.masked_fill(torch.rand(index.shape, generator=generator) < 0.2, -1)
        return query, keys, values, index, normal(generator, torch.float32, b, g, listed), valid, starts, size, d**-0.5

    return Case(name, make)


def _strange(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """Numbers that are no blocks, in int32, with biases that are no numbers, and a column in the middle without a token."""
    keys, values = (normal(generator, dtype, 1, 1, 12, 8) for _ in range(2))
    index = torch.tensor([[[3, 2, -5, 2**31 - 1, 0]]], dtype=torch.int32)
    bias = torch.tensor([[[torch.nan, -1.0, torch.nan, torch.inf, 2.0]]])
    valid = torch.arange(12)[None] != 9
    return normal(generator, dtype, 1, 3, 8), keys, values, index, bias, valid, torch.zeros(1, dtype=torch.int32), 4, 0.5


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: tokens that 32-bit offsets cannot reach."""
    keys, values = (distant(normal(generator, dtype, 3, 16))[None, None] for _ in range(2))
    index, bias, valid = torch.tensor([[[1, 0]]]), torch.zeros(1, 1, 2), torch.ones(1, 3, dtype=torch.bool)
    return normal(generator, dtype, 1, 2, 16), keys, values, index, bias, valid, torch.tensor([0]), 2, 0.25


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("one token, one head", (1,), 1, 1, 1, 1, 64, 1),
        _case("empty row, group 3, head size 72", (0, 5, 33), 35, 16, 3, 1, 72, 2),
        _case("two parts, group 7, head size 96", (250, 16), 250, 32, 7, 1, 96, 7),
        _case("blocks of 5, two heads, head size 80", (9, 57), 57, 5, 4, 2, 80, 6),
        _case("group 24, blocks of 64", (130,), 130, 64, 24, 1, 64, 3),
        _case("nothing listed", (8,), 8, 4, 2, 2, 16, 0),
        Case("numbers that are no blocks", _strange),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(
        _case("head size 128, group 4, blocks of 64", (8000, 300), 8000, 64, 32, 8, 128, 25),
        _case("head size 64, group 3, pages of 16", (8000, 300), 8000, 16, 9, 3, 64, 100),
        _case("head size 256, group 2", (300,), 300, 64, 8, 4, 256, 4),
    ),
)
