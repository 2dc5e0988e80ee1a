"""New keys and values into the slots of a paged cache, as they are.

    cache[slot] = x

Slot page * i + j is place j of block i; a negative slot stores nothing (padding). Caches are changed in place. Blocks are rounded as a
whole, when their tokens are no longer among the last (`mmsdk.kernels.ops.kv_round`).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant, normal

__all__ = ["OP", "kv_store"]


def kv_store(
    keys: Float[Tensor, "n g d"],
    values: Float[Tensor, "n g e"],
    slots: Int[Tensor, " n"],
    key_cache: Float[Tensor, "blocks page g d"],
    value_cache: Float[Tensor, "blocks page g e"],
) -> None:
    """Write n tokens; no slot may be given twice. Values may have no width. Raises InputError where a cache's channels lie apart."""
    arguments = keys, values, slots, key_cache, value_cache
    if launchable(keys):
        _plan(*arguments).run()
    else:
        _reference(*arguments)


def _reference(keys: Tensor, values: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor) -> Result:
    kept = slots >= 0
    block, slot = slots[kept] // key_cache.shape[1], slots[kept] % key_cache.shape[1]
    for x, cache in ((keys, key_cache), (values, value_cache)):
        cache[block, slot] = x[kept].to(cache.dtype)
    return key_cache, value_cache


def _plan(keys: Tensor, values: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor) -> Plan:
    parts = ((keys, key_cache), (values, value_cache))
    return Plan((key_cache, value_cache), tuple(_launch(x, cache, slots) for x, cache in parts if x.numel()))


def _launch(x: Tensor, cache: Tensor, slots: Tensor) -> Launch:
    n, g, d = x.shape
    if cache.stride(-1) != 1:
        raise InputError("the channels of a cache lie side by side in memory", item="cache")
    x = x if x.stride(-1) == 1 else x.contiguous()
    arguments: dict[str, Tensor | int | float] = {
        "x": x,
        "cache": cache,
        "slots": slots,
        "x_token": x.stride(0),
        "x_head": x.stride(1),
        "cache_block": cache.stride(0),
        "cache_slot": cache.stride(1),
        "cache_head": cache.stride(2),
        "g": g,
        "d": d,
    }
    constants = {"page": cache.shape[1], "many": power(g), "block": power(d)}
    return Launch(_kernel, (n,), arguments, constants, warps=4 if power(g) * power(d) <= 4096 else 8)


@jit
def _kernel(
    x: tl.tensor,
    cache: tl.tensor,
    slots: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    cache_block: tl.tensor,
    cache_slot: tl.tensor,
    cache_head: tl.tensor,
    g: tl.tensor,
    d: tl.tensor,
    page: tl.constexpr,
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
    tl.store(target, value.to(cache.dtype.element_ty), mask=inside)


def _case(name: str, slots: tuple[int, ...], blocks: int, g: int, d: int, fused: bool = False, e: int | None = None) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        n, wide = len(slots), d if e is None else e
        both = normal(generator, dtype, n, 2 * g, d) if fused else normal(generator, dtype, 2 * n, g, d)
        keys, values = both.split(g, 1) if fused else both.split(n)
        caches = (torch.full((blocks, 16, g, width), 9.0, dtype=dtype) for width in (d, wide))
        return keys, values[..., :wide], torch.tensor(slots), *caches

    return Case(name, make)


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: a block that 32-bit offsets cannot reach."""
    caches = (distant(normal(generator, dtype, 2, 16, 1, 4)) for _ in range(2))
    return normal(generator, dtype, 2, 1, 4), normal(generator, dtype, 2, 1, 4), torch.tensor([17, 3]), *caches


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("one number", (0,), 1, 1, 1),
        _case("scattered, with padding", (40, -1, 3, 16), 3, 3, 72, fused=True),
        _case("latents, whose values have no width", (5, 17), 2, 1, 40, e=0),
        _case("values narrower than keys", (5, 17), 2, 2, 24, e=16),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(
        _case("8 heads of 128", tuple(range(64)), 4, 8, 128),
        _case("32 heads of 128", tuple(range(64)), 4, 32, 128),
    ),
)
