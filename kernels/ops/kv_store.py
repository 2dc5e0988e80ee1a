"""New keys and values into the slots of a paged cache, as they are or as int8 codes, in one pass.

    plain:  cache[slot] = x
    int8:   scale = max |x| / 127 over the channels,   code = floor(x / scale + 1/2),   x is about code * scale

One scale per token and head, from that token alone: nothing is learned from what came before, so a warm-up leaves no trace, and no error
exceeds scale / 2. Slot 16 i + j is place j of block i; a negative slot stores nothing (padding). Caches are changed in place.

KIVI (arXiv 2402.02750) measures that keys at 2 bits want scales per channel; at 8 bits per token is what vLLM and others ship.
"""

import torch
from jaxtyping import Float, Int, Int8
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant, normal

__all__ = ["OP", "kv_store"]


def kv_store(
    keys: Float[Tensor, "n g d"],
    values: Float[Tensor, "n g d"],
    slots: Int[Tensor, " n"],
    key_cache: Float[Tensor, "blocks page g d"] | Int8[Tensor, "blocks page g d"],
    value_cache: Float[Tensor, "blocks page g d"] | Int8[Tensor, "blocks page g d"],
    key_scales: Float[Tensor, "blocks page g"] | None = None,
    value_scales: Float[Tensor, "blocks page g"] | None = None,
) -> None:
    """Write n tokens; no slot may be given twice. int8 caches take both scales, which are written too.

    Raises InputError where scales and caches do not go together.
    """
    coded = key_cache.dtype == torch.int8
    if {coded, value_cache.dtype == torch.int8, key_scales is not None, value_scales is not None} not in ({True}, {False}):
        raise InputError("int8 caches need both scales, others none", item="key_scales")
    arguments = keys, values, slots, key_cache, value_cache, key_scales, value_scales
    if launchable(keys):
        _plan(*arguments).run()
    else:
        _reference(*arguments)


def _reference(
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> Result:
    kept = slots >= 0
    block, slot = slots[kept] // key_cache.shape[1], slots[kept] % key_cache.shape[1]
    for x, cache, scales in ((keys, key_cache, key_scales), (values, value_cache, value_scales)):
        if scales is None:
            cache[block, slot] = x[kept].to(cache.dtype)
        else:
            wide = x[kept].float()
            scale = wide.abs().amax(-1) * (1 / 127)
            cache[block, slot] = (wide / scale.where(scale > 0, 1)[..., None] + 0.5).floor().clamp(-127, 127).to(torch.int8)
            scales[block, slot] = scale
    scales_too = () if key_scales is None or value_scales is None else (key_scales, value_scales)
    return key_cache, value_cache, *scales_too


def _plan(
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> Plan:
    launches = tuple(_launch(*part, slots) for part in ((keys, key_cache, key_scales), (values, value_cache, value_scales)))
    scales = () if key_scales is None or value_scales is None else (key_scales, value_scales)
    return Plan((key_cache, value_cache, *scales), launches)


def _launch(x: Tensor, cache: Tensor, scales: Tensor | None, slots: Tensor) -> Launch:
    n, g, d = x.shape
    if cache.stride(-1) != 1:
        raise InputError("the channels of a cache lie side by side in memory", item="cache")
    x = x if x.stride(-1) == 1 else x.contiguous()
    arguments: dict[str, Tensor | int | float] = {
        "x": x,
        "cache": cache,
        "scales": cache if scales is None else scales,
        "slots": slots,
        "x_token": x.stride(0),
        "x_head": x.stride(1),
        "cache_block": cache.stride(0),
        "cache_slot": cache.stride(1),
        "cache_head": cache.stride(2),
        "scale_block": 0 if scales is None else scales.stride(0),
        "scale_slot": 0 if scales is None else scales.stride(1),
        "scale_head": 0 if scales is None else scales.stride(2),
        "g": g,
        "d": d,
    }
    constants = {"page": cache.shape[1], "coded": scales is not None, "many": power(g), "block": power(d)}
    return Launch(_kernel, (n,), arguments, constants, warps=4 if power(g) * power(d) <= 4096 else 8)


@jit
def _kernel(
    x: tl.tensor,
    cache: tl.tensor,
    scales: tl.tensor,
    slots: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    cache_block: tl.tensor,
    cache_slot: tl.tensor,
    cache_head: tl.tensor,
    scale_block: tl.tensor,
    scale_slot: tl.tensor,
    scale_head: tl.tensor,
    g: tl.tensor,
    d: tl.tensor,
    page: tl.constexpr,
    coded: tl.constexpr,
    many: tl.constexpr,
    block: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    home = slot // page
    place = slot % page
    head = tl.arange(0, many).to(tl.int64)
    channel = tl.arange(0, block)
    real = head < tl.where(slot >= 0, g, 0)
    inside = real[:, None] & (channel < d)[None, :]
    value = tl.load(x + token * x_token + head[:, None] * x_head + channel[None, :], mask=inside, other=0.0)
    target = cache + home * cache_block + place * cache_slot + head[:, None] * cache_head + channel[None, :]
    if coded:
        wide = value.to(tl.float32)
        # the same multiplication as the reference's, and division that rounds: codes agree to the last one
        scale = tl.max(tl.abs(wide), 1) * 0.007874015748031496
        code = tl.floor(tl.div_rn(wide, tl.where(scale > 0, scale, 1.0)[:, None]) + 0.5)
        code = tl.minimum(tl.maximum(code, -127.0), 127.0)
        tl.store(target, code.to(tl.int8), mask=inside)
        tl.store(scales + home * scale_block + place * scale_slot + head * scale_head, scale, mask=real)
    else:
        tl.store(target, value.to(cache.dtype.element_ty), mask=inside)


def _case(name: str, slots: tuple[int, ...], blocks: int, g: int, d: int, coded: bool, fused: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        n = len(slots)
        both = normal(generator, dtype, n, 2 * g, d) if fused else normal(generator, dtype, 2 * n, g, d)
        keys, values = both.split(g, 1) if fused else both.split(n)
        # a token that is all zeros has no scale
        keys[-1, 0] = 0
        if coded:
            caches = (torch.full((blocks, 16, g, d), 99, dtype=torch.int8) for _ in range(2))
            return keys, values, torch.tensor(slots), *caches, torch.full((blocks, 16, g), 0.5), torch.full((blocks, 16, g), 0.5)
        return keys, values, torch.tensor(slots), *(torch.full((blocks, 16, g, d), 9.0, dtype=dtype) for _ in range(2)), None, None

    return Case(name, make)


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: a block that 32-bit offsets cannot reach."""
    caches = (distant(normal(generator, dtype, 2, 16, 1, 4)) for _ in range(2))
    return normal(generator, dtype, 2, 1, 4), normal(generator, dtype, 2, 1, 4), torch.tensor([17, 3]), *caches, None, None


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("one number", (0,), 1, 1, 1, coded=False),
        _case("scattered, with padding", (40, -1, 3, 16), 3, 3, 72, coded=False, fused=True),
        _case("int8, scattered, with padding", (40, -1, 3, 16), 3, 3, 72, coded=True, fused=True),
        _case("int8, one number", (5,), 1, 1, 1, coded=True),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(
        _case("int8, 8 heads of 128", tuple(range(64)), 4, 8, 128, coded=True),
        _case("8 heads of 128", tuple(range(64)), 4, 8, 128, coded=False),
        _case("int8, 32 heads of 128", tuple(range(64)), 4, 32, 128, coded=True),
    ),
)
