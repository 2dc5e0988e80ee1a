"""Attention over the parts of a row, and the merge of the parts: what decode kernels share (split-KV, Flash-Decoding).

A program takes one part of a row (`share_of`), tile by tile with a running maximum (`weighed`), and leaves what it has (`leave`): these
three are used within kernels. A part leaves its mixture of values o_i and lse_i, the logarithm to base 2 of its sum of weights; together

    lse = log2(sum_i 2 ** lse_i + 2 ** sink),   out = sum_i o_i 2 ** (lse_i - lse)

A part that saw nothing has an lse of -inf and a mixture of 0; so has a row of which every part did.
"""

import torch
from torch import Tensor

from mmsdk.kernels._triton import jit, power, tl
from mmsdk.kernels.case import Launch

__all__ = ["LOG2E", "leave", "merged", "parts_of", "share_of", "unmerged", "weighed"]

LOG2E = 1.4426950408889634

# Tokens of a part at least, parts of a row at most, and programs that fill a GPU of this day. Guesses, until one has been measured.
_TOKENS, _PARTS, _PROGRAMS = 128, 32, 512


def parts_of(tokens: int, rows: int) -> int:
    """Into how many parts to split each of so many rows of at most so many tokens."""
    return max(1, min(_PARTS, -(-tokens // _TOKENS), -(-_PROGRAMS // max(rows, 1))))


def unmerged(b: int, h: int, parts: int, d: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for the mixtures and the logarithms of all parts, float32."""
    mixtures = torch.empty(b, h, parts, d, dtype=torch.float32, device=device)
    return mixtures, torch.empty(b, h, parts, dtype=torch.float32, device=device)


def merged(partial: Tensor, partial_lse: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Launch]:
    """The result [b, h, d], its natural log-sum-exp [b, h], and the launch that computes them from the parts."""
    b, h, parts, d = partial.shape
    out = torch.empty(b, h, d, dtype=dtype, device=partial.device)
    lse = torch.empty(b, h, dtype=torch.float32, device=partial.device)
    arguments: dict[str, Tensor | int | float] = {
        "partial": partial,
        "partial_lse": partial_lse,
        "sinks": lse if sinks is None else sinks,
        "out": out,
        "lse": lse,
        "heads": h,
        "parts": parts,
    }
    constants = {"d": d, "sink": sinks is not None, "part_block": power(parts), "block": power(d)}
    return out, lse, Launch(_kernel, (b * h,), arguments, constants, warps=4 if power(parts) * power(d) <= 4096 else 8)


@jit
def share_of(part: tl.tensor, parts: tl.tensor, tokens: tl.tensor, columns: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """From where to where one of so many parts goes; parts are whole tiles of `columns` tokens."""
    share = ((tokens + parts - 1) // parts + columns - 1) // columns * columns
    return part * share, tl.minimum(part * share + share, tokens)


@jit
def weighed(scores: tl.tensor, best: tl.tensor, total: tl.tensor, mixed: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """With one tile more: the maximum, the sum of the weights, the mixture so far under that maximum, and the weights of the tile."""
    peak = tl.maximum(best, tl.max(scores, 1))
    # where nothing was seen yet the peak is -inf, and -inf less -inf no number
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(scores - anchor[:, None])
    shrink = tl.exp2(best - anchor)
    return peak, total * shrink + tl.sum(weights, 1), mixed * shrink[:, None], weights


@jit
def leave(
    partial: tl.tensor,
    partial_lse: tl.tensor,
    heads: tl.tensor,
    real: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    d: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """The part of these heads, counted over all rows, those that are `real`."""
    channel = tl.arange(0, block)
    alive = total > 0
    divisor = tl.where(alive, total, 1.0)
    place = heads * tl.num_programs(1) + tl.program_id(1)
    tl.store(partial + place[:, None] * d + channel[None, :], mixed / divisor[:, None], mask=real[:, None] & (channel < d)[None, :])
    tl.store(partial_lse + place, tl.where(alive, best + tl.log2(divisor), float("-inf")), mask=real)


@jit
def _kernel(
    partial: tl.tensor,
    partial_lse: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    heads: tl.tensor,
    parts: tl.tensor,
    d: tl.constexpr,
    sink: tl.constexpr,
    part_block: tl.constexpr,
    block: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, part_block)
    channel = tl.arange(0, block)
    logs = tl.load(partial_lse + place * parts + part, mask=part < parts, other=float("-inf"))
    peak = tl.max(logs, 0)
    if sink:
        drain = tl.load(sinks + place % heads).to(tl.float32) * 1.4426950408889634
        peak = tl.maximum(peak, drain)
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(logs - anchor)
    total = tl.sum(weights, 0)
    if sink:
        total += tl.exp2(drain - anchor)
    alive = total > 0
    divisor = tl.where(alive, total, 1.0)
    at = (place * parts + part)[:, None] * d + channel[None, :]
    mixed = tl.load(partial + at, mask=(part < parts)[:, None] & (channel < d)[None, :], other=0.0)
    result = tl.sum(mixed * weights[:, None], 0) / divisor
    tl.store(out + place * d + channel, result.to(out.dtype.element_ty), mask=channel < d)
    tl.store(lse + place, tl.where(alive, (anchor + tl.log2(divisor)) * 0.6931471805599453, float("-inf")))
