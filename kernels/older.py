"""Older tokens of a row, in whole blocks of codes in front of exact ones, as a decode kernel reads them.

Blocks are fp8, int8, int4 or int2, by the rule and in the form of `mmsdk.kernels.rounding`: keys with a scale and a minimum for each
channel of a block, values for each token. What a group shares commutes with both products, so that codes are multiplied as they are, which
all dtypes of the queries hold exactly, and the query and the weights take scales and minima.

Or they are turbo4 or turbo2 (`mmsdk.kernels.turbo`), keys like values each token by itself: codes name numbers of a table, and the query is
turned as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kernels._triton import jit, tl
from mmsdk.kernels.parts import share_of, weighed
from mmsdk.kernels.rounding import LEVELS, Codes, decode, plain, unpack
from mmsdk.kernels.turbo import TURBO, level_of, restored

__all__ = ["KINDS", "Older", "flat", "numbers", "of_codes", "over_codes", "reads", "unpacked"]

# Bits of a code, by what the kinds are called.
KINDS: Mapping[str, int] = MappingProxyType({**LEVELS, **TURBO})


@dataclass(frozen=True, slots=True)
class Older:
    """Codes [blocks page g p] of a pool, and the blocks of each row: those of its table, as many as `counts` says, full and in order.

    Scales and minima are [blocks 1 g d] of keys and [blocks page g 1] of values, of turbo codes of both. `turning` is the rotation that
    those are read with, where the pools are.
    """

    bits: str
    keys: Codes
    values: Codes
    table: Int[Tensor, "b most"]
    counts: Int[Tensor, " b"]
    turning: tuple[Float[Tensor, "d d"], ...] = ()

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
    return bits in KINDS and page % 16 == 0


def numbers(found: Codes, bits: str, width: int, dtype: torch.dtype) -> Float[Tensor, "*n d"]:
    """Codes of any kind as numbers again, `width` channels in a dtype."""
    if bits in LEVELS:
        return decode(found, bits, width, dtype)
    return restored(unpack(found.codes, TURBO[bits])[..., :width], found.scale, TURBO[bits]).to(dtype)


def flat(older: Older | None) -> tuple[Tensor, ...]:
    """As a reference and a plan take them, one behind the other; nothing without any."""
    if older is None:
        return ()
    k, v = older.keys, older.values
    return older.table, older.counts, k.codes, k.scale, k.low, v.codes, v.scale, v.low, *older.turning


def unpacked(bits: str, d: int, dtype: torch.dtype, table: Tensor, counts: Tensor, *pools: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which of the older tokens there are, [b, t], and their keys and values, [b, t, g, d], float32."""
    blocks = table.clamp(min=0).long()
    found = (Codes(*(pool[blocks] for pool in pools[start : start + 3])) for start in (0, 3))
    k, v = (numbers(codes, bits, d, dtype).float().flatten(1, 2) for codes in found)
    return torch.arange(k.shape[1], device=k.device) < counts[:, None] * pools[0].shape[1], k, v


def of_codes(bits: str, nothing: Tensor, columns: int, *older: Tensor) -> tuple[dict[str, Tensor | int | float], dict[str, object]]:
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
    kind = {"bits": KINDS.get(bits, 0), "fp8": bits == "fp8", "turbo": bits in TURBO}
    return arguments, {**kind, "old_page": page, "old_columns": tile}


def _alike(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Two pools as far from one block to the next, as pools are that were made together; a block is one piece of memory."""
    if one.stride(0) == other.stride(0) and one[:1].is_contiguous() and other[:1].is_contiguous():
        return one, other
    return one.contiguous(), other.contiguous()


@jit
def over_codes(
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
    turbo: tl.constexpr,
    old_page: tl.constexpr,
    old_columns: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Of a part of them the maximum of scores, the sum of weights and the mixture of values, as `mmsdk.kernels.parts` has them.

    Of turbo codes the query was turned and divided by the root of the channels' number, and so the mixture is to be.
    """
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
        if turbo:
            step = tl.load(key_scales + home * shared_heads * old_page + slot).to(tl.float32)
            scores = tl.dot(q, level_of(code, bits).to(inner), input_precision="ieee") * step[None, :]
        else:
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
        if turbo:
            mixed += tl.dot((weights * step[None, :]).to(inner), level_of(code, bits).to(inner), input_precision="ieee")
        else:
            least = tl.load(value_lows + home * shared_heads * old_page + slot).to(tl.float32)
            mixed += tl.dot((weights * step[None, :]).to(inner), plain(code, fp8, inner), input_precision="ieee")
            if not fp8:
                mixed += tl.sum(weights * least[None, :], 1)[:, None]
    return best, total, mixed
