"""What each block of a memory is worth to a query, from a landmark or from the bounds of its keys, channel by channel.

    landmark    s_c = scale q . k'_c + b_c                                                HiLS (arXiv 2607.02980), means of teams
    bounds      s_c = scale sum_i max(q_i high_ci, q_i low_ci) + b_c                      Quest (arXiv 2406.10774)

The second is scale (max(q, 0) . high_c + min(q, 0) . low_c), and no key between the bounds has a larger product with the query. Where the
query heads of a key-value head choose `together`, the largest of their scores is what counts. A bias of -inf keeps a block out, whatever
its landmark holds. Landmarks are float32, as they are folded (`mmsdk.kv.blocked`), and so are the products.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant, normal
from mmsdk.kernels.pairs import solid

__all__ = ["OP", "block_worth"]

# Blocks of a tile, and channels of a step towards their scores.
_COLUMNS, _DEPTH = 32, 32


def block_worth(
    query: Float[Tensor, "b h s d"],
    high: Float[Tensor, "b g n d"],
    low: Float[Tensor, "b g n d"] | None,
    bias: Float[Tensor, "b g n"],
    scale: float,
    together: bool,
) -> Float[Tensor, "b g r s n"]:
    """The scores of the r = h / g query heads of each key-value head, float32, or of r = 1 where they choose `together`.

    `high` are landmarks where there is no `low`. Where a gradient is wanted torch computes it, on a GPU as well. Raises InputError where g
    does not divide h.
    """
    if high.shape[1] == 0 or query.shape[1] % high.shape[1]:
        raise InputError(f"{query.shape[1]} query heads cannot share {high.shape[1]} key-value heads evenly", item="high")
    arguments = query, high, low, bias, scale, together
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (query, high, low, bias) if x is not None)
    (out,) = _plan(*arguments).run() if launchable(query) and not learns else _reference(*arguments)
    return out


def _reference(query: Tensor, high: Tensor, low: Tensor | None, bias: Tensor, scale: float, together: bool) -> Result:
    out = (bias == -torch.inf)[..., None]
    high = high.float().masked_fill(out, 0).transpose(2, 3)
    heads = query.float().unflatten(1, (high.shape[1], -1)).transpose(2, 3).flatten(2, 3)
    if low is None:
        scores = heads @ high
    else:
        scores = heads.clamp_min(0) @ high + heads.clamp_max(0) @ low.float().masked_fill(out, 0).transpose(2, 3)
    found = (scores * scale + bias.float()[:, :, None]).unflatten(2, (query.shape[2], -1)).transpose(2, 3)
    return (found.amax(2, keepdim=True) if together else found.contiguous(),)


def _plan(query: Tensor, high: Tensor, low: Tensor | None, bias: Tensor, scale: float, together: bool) -> Plan:
    b, h, s, d = query.shape
    g, n = high.shape[1:3]
    query, high = solid(query), solid(high)
    floor = high if low is None else solid(low)
    group = h // g
    out = torch.empty(b, g, 1 if together else group, s, n, dtype=torch.float32, device=query.device)
    tiles = -(-n // _COLUMNS)
    arguments: dict[str, Tensor | int | float] = {
        "query": query,
        "high": high,
        "low": floor,
        "bias": bias.contiguous(),
        "out": out,
        "query_row": query.stride(0),
        "query_head": query.stride(1),
        "query_token": query.stride(2),
        "high_row": high.stride(0),
        "high_head": high.stride(1),
        "high_block": high.stride(2),
        "low_row": floor.stride(0),
        "low_head": floor.stride(1),
        "low_block": floor.stride(2),
        "shared_heads": g,
        "tokens": s,
        "blocks": n,
        "tiles": max(tiles, 1),
        "scale": scale,
    }
    constants = {
        "group": group,
        "d": d,
        "bounds": low is not None,
        "together": together,
        "rows": max(power(group), 16),
        "columns": _COLUMNS,
        "depth": _DEPTH,
    }
    return Plan((out,), (Launch(_kernel, (b * g * s * tiles,), arguments, constants),) if out.numel() else ())


@jit
def _kernel(
    query: tl.tensor,
    high: tl.tensor,
    low: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    query_token: tl.tensor,
    high_row: tl.tensor,
    high_head: tl.tensor,
    high_block: tl.tensor,
    low_row: tl.tensor,
    low_head: tl.tensor,
    low_block: tl.tensor,
    shared_heads: tl.tensor,
    tokens: tl.tensor,
    blocks: tl.tensor,
    tiles: tl.tensor,
    scale: tl.tensor,
    group: tl.constexpr,
    d: tl.constexpr,
    bounds: tl.constexpr,
    together: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    owner = (tl.program_id(0) // tiles).to(tl.int64)
    token = owner % tokens
    shared = owner // tokens % shared_heads
    row = owner // tokens // shared_heads
    lane = tl.arange(0, rows)
    real = lane < group
    block = (tl.program_id(0) % tiles * columns + tl.arange(0, columns)).to(tl.int64)
    added = tl.load(bias + (row * shared_heads + shared) * blocks + block, mask=block < blocks, other=float("-inf")).to(tl.float32)
    there = added > float("-inf")
    q_base = query + row * query_row + token * query_token + (shared * group + lane)[:, None] * query_head
    high_base = high + row * high_row + shared * high_head + block[None, :] * high_block
    low_base = low + row * low_row + shared * low_head + block[None, :] * low_block

    sums = tl.zeros([rows, columns], tl.float32)
    for at in range(0, d, depth):
        channel = at + tl.arange(0, depth)
        inside = channel < d
        q = tl.load(q_base + channel[None, :], mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
        top = tl.load(high_base + channel[:, None], mask=there[None, :] & inside[:, None], other=0.0).to(tl.float32)
        if bounds:
            floor = tl.load(low_base + channel[:, None], mask=there[None, :] & inside[:, None], other=0.0).to(tl.float32)
            sums += tl.dot(tl.maximum(q, 0.0), top, input_precision="ieee")
            sums += tl.dot(tl.minimum(q, 0.0), floor, input_precision="ieee")
        else:
            sums += tl.dot(q, top, input_precision="ieee")
    scores = sums * scale + added[None, :]
    first = (row * shared_heads + shared) * tokens
    if together:
        best = tl.max(tl.where(real[:, None], scores, float("-inf")), 0)
        tl.store(out + (first + token) * blocks + block, best, mask=block < blocks)
    else:
        place = (first * group + lane * tokens + token)[:, None] * blocks + block[None, :]
        tl.store(out + place, scores, mask=real[:, None] & (block < blocks)[None, :])


def _case(name: str, b: int, h: int, g: int, s: int, d: int, n: int, bounds: bool = False, together: bool = False) -> Case:
    """Landmarks of blocks that are kept out hold NaN."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        out = torch.rand(b, g, n, generator=generator) < 0.2
        first, second = (normal(generator, torch.float32, b, g, n, d) for _ in range(2))
        high, low = (x.masked_fill(out[..., None], torch.nan) for x in (first.maximum(second), first.minimum(second)))
        bias = normal(generator, torch.float32, b, g, n).masked_fill(out, -torch.inf)
        return normal(generator, dtype, b, h, s, d), high, low if bounds else None, bias, d**-0.5, together

    return Case(name, make)


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: landmarks that 32-bit offsets cannot reach."""
    high = distant(normal(generator, torch.float32, 3, 8))[None, None]
    return normal(generator, dtype, 1, 2, 1, 8), high, None, torch.zeros(1, 1, 3), 0.25, False


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("one block, one head", 1, 1, 1, 1, 16, 1),
        _case("bounds, group 3, head size 72", 2, 6, 2, 1, 72, 37, bounds=True, together=True),
        _case("group 7, five queries, head size 80", 2, 7, 1, 5, 80, 33),
        _case("bounds of each head, group 24", 1, 24, 1, 2, 96, 9, bounds=True),
        _case("no block", 1, 2, 1, 1, 16, 0, together=True),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(
        _case("bounds, head size 128, group 4", 2, 32, 8, 1, 128, 2048, bounds=True, together=True),
        _case("landmarks, head size 64, group 3", 2, 9, 3, 1, 64, 2048),
        _case("landmarks, head size 256, group 24, 64 queries", 1, 48, 2, 64, 256, 512),
    ),
)
