"""Blocks of exact keys or values into blocks of codes, fp8, int8, int4 or int2, in one pass over many layers.

    codes[l, target_i], scale[l, target_i], low[l, target_i] = encode(blocks[l, source_i])

A block's tokens share a scale for each channel (keys), or each token has one over its channels (values); the rule and the form of the codes
are those of `mmsdk.kernels.rounding`. A block is read once and nothing wider than its codes is written. Scales come from the block alone:
nothing is learned from what came before, so that a warm-up leaves no trace. Pools of codes are changed in place.
"""

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant, normal
from mmsdk.kernels.rounding import LEVELS, e4m3_of, encode, nearest, scale_dtype

__all__ = ["OP", "kv_round"]


def kv_round(
    blocks: Float[Tensor, "layers blocks page g d"],
    source: Int[Tensor, " n"],
    target: Int[Tensor, " n"],
    codes: UInt8[Tensor, "layers old page g p"],
    scale: Float[Tensor, "layers old _ g _"],
    low: Float[Tensor, "layers old _ g _"],
    bits: str,
    channels: bool,
) -> None:
    """Round n blocks of every layer; no target may be given twice.

    With `channels` each channel of a head has a scale, [layers old 1 g d], else each token, [layers old page g 1]. Raises InputError for
    bits that are no name of `mmsdk.kernels.rounding.LEVELS`, and for scales of another shape.
    """
    if bits not in LEVELS:
        raise InputError(f"{bits!r} is none of {', '.join(LEVELS)}", item="bits")
    page, g, d = blocks.shape[2:]
    wanted = (*codes.shape[:2], *((1, g, d) if channels else (page, g, 1)))
    if scale.shape != wanted or low.shape != wanted:
        raise InputError(f"scales {tuple(scale.shape)} and {tuple(low.shape)}; there must be {wanted}", item="scale")
    arguments = blocks, source, target, codes, scale, low, bits, channels
    if launchable(blocks):
        _plan(*arguments).run()
    else:
        _reference(*arguments)


def _reference(
    blocks: Tensor, source: Tensor, target: Tensor, codes: Tensor, scale: Tensor, low: Tensor, bits: str, channels: bool
) -> Result:
    found = encode(blocks[:, source.long()], 2 if channels else 4, bits)
    for kept, new in ((codes, found.codes), (scale, found.scale), (low, found.low)):
        kept[:, target.long()] = new
    return codes, scale, low


def _plan(blocks: Tensor, source: Tensor, target: Tensor, codes: Tensor, scale: Tensor, low: Tensor, bits: str, channels: bool) -> Plan:
    layers, _, page, g, d = blocks.shape
    if any(x.stride(-1) != 1 for x in (blocks, codes, scale, low)):
        raise InputError("the channels of a pool lie side by side in memory", item="blocks")
    arguments: dict[str, Tensor | int | float] = {
        "blocks": blocks,
        "source": source,
        "target": target,
        "codes": codes,
        "scale": scale,
        "low": low,
        "count": len(source),
        "heads": g,
    }
    for name, x in (("block", blocks), ("code", codes), ("scale", scale), ("low", low)):
        arguments |= {f"{name}_{axis}": x.stride(place) for place, axis in enumerate(("layer", "block", "slot", "head"))}
    tile = power(page) * max(power(d), 8)
    constants = {
        "page": page,
        "d": d,
        "bits": LEVELS[bits],
        "fp8": bits == "fp8",
        "channels": channels,
        "most": torch.finfo(scale.dtype).max,
        "slots": power(page),
        "block": max(power(d), 8),
    }
    launch = Launch(_kernel, (layers * len(source) * g,), arguments, constants, warps=4 if tile <= 4096 else 8)
    return Plan((codes, scale, low), (launch,) if len(source) else ())


@jit
def _kernel(
    blocks: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    low: tl.tensor,
    block_layer: tl.tensor,
    block_block: tl.tensor,
    block_slot: tl.tensor,
    block_head: tl.tensor,
    code_layer: tl.tensor,
    code_block: tl.tensor,
    code_slot: tl.tensor,
    code_head: tl.tensor,
    scale_layer: tl.tensor,
    scale_block: tl.tensor,
    scale_slot: tl.tensor,
    scale_head: tl.tensor,
    low_layer: tl.tensor,
    low_block: tl.tensor,
    low_slot: tl.tensor,
    low_head: tl.tensor,
    count: tl.tensor,
    heads: tl.tensor,
    page: tl.constexpr,
    d: tl.constexpr,
    bits: tl.constexpr,
    fp8: tl.constexpr,
    channels: tl.constexpr,
    most: tl.constexpr,
    slots: tl.constexpr,
    block: tl.constexpr,
) -> None:
    head = (tl.program_id(0) % heads).to(tl.int64)
    place = tl.program_id(0) // heads % count
    layer = (tl.program_id(0) // heads // count).to(tl.int64)
    here = tl.load(source + place).to(tl.int64)
    there = tl.load(target + place).to(tl.int64)
    slot = tl.arange(0, slots)
    channel = tl.arange(0, block)
    inside = (slot < page)[:, None] & (channel < d)[None, :]
    from_where = layer * block_layer + here * block_block + head * block_head
    x = tl.load(blocks + from_where + slot[:, None] * block_slot + channel[None, :], mask=inside, other=0.0).to(tl.float32)

    axis: tl.constexpr = 0 if channels else 1
    stored = scale.dtype.element_ty
    if fp8:
        least = tl.zeros_like(tl.max(x, axis))
        span = tl.div_rn(tl.max(tl.abs(x), axis), 448.0)
    else:
        smallest = tl.min(tl.where(inside, x, float("inf")), axis)
        least = tl.minimum(tl.maximum(smallest, -most), most).to(stored).to(tl.float32)
        largest = tl.max(tl.where(inside, x, float("-inf")), axis)
        steps = 1.0 * ((1 << bits) - 1)
        span = tl.div_rn(largest - tl.minimum(smallest, least), steps)
    span = tl.minimum(span, most)
    near = span.to(stored).to(tl.float32)
    # one step up of a float16 that was rounded down, as the reference does it
    raised = tl.minimum(near * 1.0009765625, most).to(stored).to(tl.float32)
    step = tl.where(near < span, raised, near)
    step = tl.where(step > 0, step, 1.0)
    along = channel if channels else slot
    at = tl.arange(0, block) if channels else tl.arange(0, slots) * scale_slot
    low_at = tl.arange(0, block) if channels else tl.arange(0, slots) * low_slot
    real = along < (d if channels else page)
    tl.store(scale + layer * scale_layer + there * scale_block + head * scale_head + at, step.to(stored), mask=real)
    tl.store(low + layer * low_layer + there * low_block + head * low_head + low_at, least.to(stored), mask=real)

    by = tl.div_rn(x - tl.expand_dims(least, axis), tl.expand_dims(step, axis))
    if fp8:
        code = e4m3_of(tl.minimum(tl.maximum(by, -448.0), 448.0))
    else:
        code = tl.minimum(tl.maximum(nearest(by), 0.0), 1.0 * ((1 << bits) - 1)).to(tl.uint8)
    each: tl.constexpr = 8 // bits
    packed: tl.constexpr = block // each
    if each > 1:
        shift = tl.arange(0, each) * bits
        apart = tl.reshape(tl.where(inside, code, 0).to(tl.int32), (slots, packed, each))
        code = tl.sum(apart << shift[None, None, :], 2).to(tl.uint8)
    byte = tl.arange(0, packed)
    to_where = layer * code_layer + there * code_block + head * code_head
    filled = (slot < page)[:, None] & (byte * each < d)[None, :]
    tl.store(codes + to_where + slot[:, None] * code_slot + byte[None, :], code, mask=filled)


def _case(name: str, bits: str, channels: bool, page: int, g: int, d: int, layers: int = 1, wide: bool = False) -> Case:
    """Three of five blocks; a channel that is large for every token, and one that is the same. `wide` numbers are beyond a float16."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        blocks = normal(generator, dtype, layers, 5, page, g, d)
        blocks[..., d // 2] += 40
        blocks[:, 4, :, 0] = 3
        if wide and dtype != torch.float16:
            blocks *= 65504
        source, target = torch.tensor([4, 0, 2]), torch.tensor([1, 6, 3], dtype=torch.int32)
        codes = torch.full((layers, 7, page, g, -(-d * LEVELS[bits] // 8)), 99, dtype=torch.uint8)
        shape = (layers, 7, 1, g, d) if channels else (layers, 7, page, g, 1)
        scale, low = (torch.full(shape, 0.5, dtype=scale_dtype(dtype)) for _ in range(2))
        return blocks, source, target, codes, scale, low, bits, channels

    return Case(name, make)


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: blocks that 32-bit offsets cannot reach, to be read and to be written."""
    blocks, codes = distant(normal(generator, dtype, 2, 4, 1, 8)), distant(torch.full((2, 4, 1, 8), 99, dtype=torch.uint8))
    scale, low = (torch.full((1, 2, 4, 1, 1), 0.5, dtype=scale_dtype(dtype)) for _ in range(2))
    return blocks[None], torch.tensor([1]), torch.tensor([1]), codes[None], scale, low, "int8", False


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("int8, keys, head size 72", "int8", True, 16, 2, 72, layers=2),
        _case("int8, values, head size 80", "int8", False, 16, 2, 80, layers=2),
        _case("int4, keys, head size 96", "int4", True, 32, 1, 96),
        _case("int4, values, an odd head", "int4", False, 16, 3, 7),
        _case("int2, keys, an odd head, pages of 3", "int2", True, 3, 1, 9),
        _case("fp8, keys, head size 64", "fp8", True, 16, 1, 64),
        _case("fp8, values, head size 256", "fp8", False, 16, 1, 256),
        _case("int8, beyond the scales' numbers", "int8", True, 4, 1, 8, wide=True),
        _case("int2, scales beyond their numbers", "int2", False, 4, 1, 8, wide=True),
        _case("fp8, beyond the scales' numbers", "fp8", False, 4, 1, 8, wide=True),
        _case("one number", "int4", False, 1, 1, 1),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(
        _case("int4, keys, 8 heads of 128", "int4", True, 32, 8, 128),
        _case("int8, values, 8 heads of 128", "int8", False, 32, 8, 128),
        _case("fp8, keys, 8 heads of 128", "fp8", True, 32, 8, 128),
        _case("fp8, values, 4 heads of 256", "fp8", False, 32, 4, 256),
        _case("int4, values, 9 heads of 72", "int4", False, 32, 9, 72),
    ),
)
