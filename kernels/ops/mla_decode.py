"""Decoding over a paged latent cache: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in its absorbed form.

A token's entry is [c ; r]: the normalised latent c (512 channels), from which every head's key and value come by a matrix each, and one
rotated key r (64) that all heads share. The key matrix goes into the query once, q_c = W_UK^T q, and the value matrix waits for the end:

    s_hj = scale (q_c . c_j + q_r . r_j),   out_h = sum_j softmax_j(s_hj) c_j,   then the caller's W_UV out_h

So keys and values of all heads are one entry of 576 numbers, read once for 16 heads at a time. Splits, merges and lengths as in
`paged_decode`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import accumulable, jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant, normal
from mmsdk.kernels.parts import LOG2E, leave, merged, parts_of, share_of, unmerged, weighed

__all__ = ["OP", "mla_decode"]

_WIDEST = 512
_HEADS = 16


def mla_decode(
    query: Float[Tensor, "b h w"],
    cache: Float[Tensor, "blocks page w"],
    table: Int[Tensor, "b most"],
    lengths: Int[Tensor, " b"],
    scale: float,
    latent: int,
) -> tuple[Float[Tensor, "b h latent"], Float[Tensor, "b h"]]:
    """The mixtures of latents and the log-sum-exp of the scores, float32. `query` holds [q_c ; q_r], as the cache holds [c ; r].

    `latent` is the width of c: 512 of 576 for DeepSeek-V2 and V3. Raises InputError where it is not below w, and above 512.
    """
    if not 0 < latent < query.shape[2]:
        raise InputError(f"{latent} of {query.shape[2]} channels leave none for the rotated key", item="latent")
    if latent > _WIDEST:
        raise InputError(f"latents of {latent} channels; at most {_WIDEST}", item="latent")
    arguments = query, cache, table, lengths, scale, latent
    out, lse = _plan(*arguments).run() if launchable(query) else _reference(*arguments)
    return out, lse


def _reference(query: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, scale: float, latent: int) -> Result:
    seen = torch.arange(table.shape[1] * cache.shape[1], device=query.device) < lengths[:, None]
    # 0 where nothing is seen, whatever the cache holds there
    entries = cache[table.clamp(min=0).long()].float().flatten(1, 2).masked_fill(~seen[..., None], 0)
    scores = (torch.einsum("bhw,btw->bht", query.float(), entries) * scale).masked_fill(~seen[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return torch.einsum("bht,btc->bhc", weights, entries[..., :latent]).to(query.dtype), lse


def _plan(query: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, scale: float, latent: int) -> Plan:
    b, h, w = query.shape
    page = cache.shape[1]
    if cache.stride(-1) != 1:
        raise InputError("the channels of a cache lie side by side in memory", item="cache")
    query, table = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, table))
    tiles = -(-h // _HEADS)
    parts = parts_of(table.shape[1] * page, b * tiles)
    partial, partial_lse = unmerged(b, h, parts, latent, query.device)
    split = Launch(
        _split,
        (b * tiles, parts),
        {
            "query": query,
            "cache": cache,
            "table": table,
            "lengths": lengths,
            "partial": partial,
            "partial_lse": partial_lse,
            "query_row": query.stride(0),
            "query_head": query.stride(1),
            "cache_block": cache.stride(0),
            "cache_slot": cache.stride(1),
            "table_row": table.stride(0),
            "heads": h,
            "tiles": tiles,
            "scale": scale * LOG2E,
        },
        {
            "latent": latent,
            "turned": w - latent,
            "page": page,
            "inner": accumulable(query.dtype),
            "rows": _HEADS,
            "columns": 16,
            "latent_block": max(power(latent), 16),
            "turned_block": max(power(w - latent), 16),
        },
    )
    out, lse, merge = merged(partial, partial_lse, None, query.dtype)
    return Plan((out, lse), (split, merge))


@jit
def _split(
    query: tl.tensor,
    cache: tl.tensor,
    table: tl.tensor,
    lengths: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    cache_block: tl.tensor,
    cache_slot: tl.tensor,
    table_row: tl.tensor,
    heads: tl.tensor,
    tiles: tl.tensor,
    scale: tl.tensor,
    latent: tl.constexpr,
    turned: tl.constexpr,
    page: tl.constexpr,
    inner: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    latent_block: tl.constexpr,
    turned_block: tl.constexpr,
) -> None:
    row = (tl.program_id(0) // tiles).to(tl.int64)
    low, high = share_of(tl.program_id(1), tl.num_programs(1), tl.load(lengths + row).to(tl.int32), columns)

    head = (tl.program_id(0) % tiles * rows + tl.arange(0, rows)).to(tl.int64)
    real = (head < heads)[:, None]
    channel = tl.arange(0, latent_block)
    narrow = (channel < latent)[None, :]
    turn = tl.arange(0, turned_block)
    few = (turn < turned)[None, :]
    q_at = query + row * query_row + head[:, None] * query_head
    q_c = tl.load(q_at + channel[None, :], mask=real & narrow, other=0.0).to(inner)
    q_r = tl.load(q_at + latent + turn[None, :], mask=real & few, other=0.0).to(inner)

    best = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, latent_block], tl.float32)
    for at in range(low, high, columns):
        token = at + tl.arange(0, columns)
        there = token < high
        home = tl.load(table + row * table_row + token // page, mask=there, other=0).to(tl.int64)
        entry = cache + (home * cache_block + (token % page).to(tl.int64) * cache_slot)[:, None]
        c = tl.load(entry + channel[None, :], mask=there[:, None] & narrow, other=0.0).to(inner)
        r = tl.load(entry + latent + turn[None, :], mask=there[:, None] & few, other=0.0).to(inner)
        scores = tl.dot(q_c, tl.trans(c), input_precision="ieee") + tl.dot(q_r, tl.trans(r), input_precision="ieee")
        best, total, mixed, weights = weighed(tl.where(there[None, :], scores * scale, float("-inf")), best, total, mixed)
        mixed += tl.dot(weights.to(inner), c, input_precision="ieee")
    leave(partial, partial_lse, row * heads + head, head < heads, best, total, mixed, latent, latent_block)


def _case(name: str, lengths: tuple[int, ...], most: int, h: int, latent: int, turned: int) -> Case:
    """Blocks of 16 in random order; blocks and slots that no row owns hold NaN. Scores are about as large as a trained model's."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        b, blocks, w = len(lengths), len(lengths) * most + 1, latent + turned
        table = torch.randperm(blocks, generator=generator)[: b * most].view(b, most).to(torch.int32)
        owned = (torch.arange(most * 16) < torch.tensor(lengths)[:, None]).view(b, most, 16)
        free = torch.ones(blocks, 16, dtype=torch.bool)
        free[table[owned.any(-1)].long()] = ~owned[owned.any(-1)]
        cache = normal(generator, dtype, blocks, 16, w).masked_fill_(free[..., None], torch.nan)
        return normal(generator, dtype, b, h, w), cache, table, torch.tensor(lengths), w**-0.5, latent

    return Case(name, make)


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: blocks that 32-bit offsets cannot reach."""
    cache = distant(normal(generator, dtype, 2, 16, 12))
    return normal(generator, dtype, 1, 2, 12), cache, torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([20]), 0.25, 8


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("one token, one head", (1,), 1, 1, 16, 4),
        _case("empty row, 20 heads, odd widths", (0, 5, 33), 3, 20, 40, 9),
        _case("two parts", (150, 16), 10, 3, 32, 16),
        _case("512 of 576", (40,), 3, 16, 512, 64),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(_case("512 of 576, 128 heads", (100, 300), 32, 128, 512, 64), _case("512 of 576, 16 heads", (100, 300), 32, 16, 512, 64)),
)
