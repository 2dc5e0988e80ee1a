"""Rotary position embedding (RoFormer, arXiv 2104.09864) of queries and keys in one call; values are no argument of it.

Channel pairs turn by an angle each, cos and sin of which are given for every token:

    a' = a cos - b sin,   b' = b cos + a sin

The pair is (i, i + f) or, interleaved, (2 i, 2 i + 1), of the first 2 f channels; the others pass as they are (partial rotation).
With one table all pairs follow one position. With three (M-RoPE, Qwen2-VL, arXiv 2409.12191) the pairs fall into sections that
follow time, row and column: the first sections[0] pairs read table 0, the next sections[1] table 1, the rest table 2. By turns (interleaved
M-RoPE, Qwen3-VL, arXiv 2511.21631) pair i follows table i % 3 as long as i // 3 is below that table's count, and time from there on, so
that each axis has fast pairs and slow ones.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import jit, launchable, power, tl
from mmsdk.kernels.case import Arguments, Case, Launch, Op, Plan, Result, distant, normal

__all__ = ["OP", "rope"]

_HEADS = 8


def rope(
    query: Float[Tensor, "b h s d"],
    keys: Float[Tensor, "b g s d"],
    cos: Float[Tensor, "c b s f"],
    sin: Float[Tensor, "c b s f"],
    sections: tuple[int, ...],
    interleaved: bool = False,
    turns: bool = False,
) -> tuple[Float[Tensor, "b h s d"], Float[Tensor, "b g s d"]]:
    """New tensors, rotated; the arguments may be views of one fused projection and stay as they are.

    `sections` counts the pairs that follow each of the c tables, (f,) where there is one; with `turns` they take turns. `interleaved` tells
    how channels are paired, not which table a pair follows. Raises InputError where the sections do not add up.
    """
    if len(sections) != len(cos) or len(sections) not in (1, 3) or sum(sections) != cos.shape[-1]:
        raise InputError(f"they share {cos.shape[-1]} pairs among {len(cos)} tables (1 or 3); got {sections}", item="sections")
    if 2 * cos.shape[-1] > query.shape[-1]:
        raise InputError(f"{cos.shape[-1]} pairs do not fit into heads of {query.shape[-1]} channels", item="cos")
    arguments = query, keys, cos, sin, sections, interleaved, turns
    turned, turned_keys = _plan(*arguments).run() if launchable(query) else _reference(*arguments)
    return turned, turned_keys


def _reference(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, sections: tuple[int, ...], interleaved: bool, turns: bool) -> Result:
    pair = torch.arange(cos.shape[-1], device=cos.device)
    table = _axes(sections, turns).to(cos.device)
    c, s = (angles.float()[table, :, :, pair].permute(1, 2, 0)[:, None] for angles in (cos, sin))

    def turned(x: Tensor) -> Tensor:
        wide, f = x.float(), c.shape[-1]
        head, rest = wide[..., : 2 * f], wide[..., 2 * f :]
        a, b = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
        left, right = a * c - b * s, b * c + a * s
        both = torch.stack((left, right), -1).flatten(-2) if interleaved else torch.cat((left, right), -1)
        return torch.cat((both, rest), -1).to(x.dtype)

    return turned(query), turned(keys)


def _axes(sections: tuple[int, ...], turns: bool) -> Tensor:
    """The table of each pair."""
    if not turns:
        return torch.arange(len(sections)).repeat_interleave(torch.tensor(sections))
    pair = torch.arange(sum(sections))
    axis = pair % len(sections)
    return axis.masked_fill(pair // len(sections) >= torch.tensor(sections)[axis], 0)


def _plan(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, sections: tuple[int, ...], interleaved: bool, turns: bool) -> Plan:
    cos, sin = cos.contiguous(), sin.contiguous()
    out = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, keys)]
    launches = (_launch(x, to, cos, sin, sections, interleaved, turns) for x, to in zip((query, keys), out, strict=True))
    return Plan((out[0], out[1]), tuple(launches))


def _launch(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, sections: tuple[int, ...], interleaved: bool, turns: bool) -> Launch:
    b, heads, s, d = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    f = cos.shape[-1]
    # where the second and the third section begin, or, by turns, how many pairs follow the second and the third table
    first, second = sections[0], sum(sections[:2])
    if turns and len(sections) == 3:
        first, second = sections[1:]
    arguments: dict[str, Tensor | int | float] = {
        "x": x,
        "out": out,
        "cos": cos,
        "sin": sin,
        "s": s,
        "heads": heads,
        "d": d,
        "f": f,
        "x_row": x.stride(0),
        "x_head": x.stride(1),
        "x_token": x.stride(2),
        "table": cos.stride(0),
        "first": first,
        "second": second,
    }
    rest = d - 2 * f
    constants = {
        "interleaved": interleaved,
        "turns": turns and len(sections) == 3,
        "rest": rest,
        "many": _HEADS,
        "pairs": power(f),
        "others": power(rest),
    }
    return Launch(_kernel, (b * s, -(-heads // _HEADS)), arguments, constants)


@jit
def _kernel(
    x: tl.tensor,
    out: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    s: tl.tensor,
    heads: tl.tensor,
    d: tl.tensor,
    f: tl.tensor,
    x_row: tl.tensor,
    x_head: tl.tensor,
    x_token: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    interleaved: tl.constexpr,
    turns: tl.constexpr,
    rest: tl.constexpr,
    many: tl.constexpr,
    pairs: tl.constexpr,
    others: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    row = token // s
    place = token % s
    head = (tl.program_id(1) * many + tl.arange(0, many)).to(tl.int64)
    here = (head < heads)[:, None]
    pair = tl.arange(0, pairs)
    turning = pair < f
    if turns:
        axis = pair % 3
        section = tl.where(pair // 3 < tl.where(axis == 1, first, second), axis, 0).to(tl.int64)
    else:
        # sections come in the order of the tables
        section = (pair >= first).to(tl.int64) + (pair >= second).to(tl.int64)
    c = tl.load(cos + section * table + token * f + pair, mask=turning, other=0.0).to(tl.float32)[None, :]
    sn = tl.load(sin + section * table + token * f + pair, mask=turning, other=0.0).to(tl.float32)[None, :]
    left = 2 * pair if interleaved else pair
    right = 2 * pair + 1 if interleaved else pair + f
    source = x + (row * x_row + head * x_head + place * x_token)[:, None]
    target = out + ((row * heads + head) * s + place)[:, None] * d
    mask = here & turning[None, :]
    a = tl.load(source + left[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + right[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(target + left[None, :], (a * c - b * sn).to(out.dtype.element_ty), mask=mask)
    tl.store(target + right[None, :], (b * c + a * sn).to(out.dtype.element_ty), mask=mask)
    if rest > 0:
        channel = 2 * f + tl.arange(0, others)
        still = here & (channel < d)[None, :]
        tl.store(target + channel[None, :], tl.load(source + channel[None, :], mask=still, other=0.0), mask=still)


def _case(
    name: str,
    b: int,
    h: int,
    g: int,
    s: int,
    d: int,
    sections: tuple[int, ...],
    interleaved: bool = False,
    fused: bool = False,
    turns: bool = False,
) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
        if fused:
            # query, keys and values of a token side by side, as one projection leaves them
            heads = normal(generator, dtype, b, s, h + 2 * g, d).transpose(1, 2)
            query, keys = heads[:, :h], heads[:, h : h + g]
        else:
            query, keys = normal(generator, dtype, b, h, s, d), normal(generator, dtype, b, g, s, d)
        angles = torch.rand(len(sections), b, s, sum(sections), generator=generator) * 6.3
        return query, keys, angles.cos(), angles.sin(), sections, interleaved, turns

    return Case(name, make)


def _distant(generator: torch.Generator, dtype: torch.dtype) -> Arguments:
    """KA-09: rows of a batch that 32-bit offsets cannot reach."""
    query, keys = (distant(normal(generator, dtype, 2, heads, 3, 8)) for heads in (2, 1))
    angles = torch.rand(1, 2, 3, 4, generator=generator) * 6.3
    return query, keys, angles.cos(), angles.sin(), (4,), False, False


OP = Op(
    _reference,
    _plan,
    cases=(
        _case("one pair", 1, 1, 1, 1, 2, (1,)),
        _case("head size 72, group 3", 2, 3, 1, 5, 72, (36,), fused=True),
        _case("half of the channels", 1, 9, 3, 3, 16, (4,), fused=True),
        _case("interleaved, partial", 1, 4, 2, 3, 24, (8,), interleaved=True),
        _case("three sections", 2, 4, 2, 3, 16, (2, 3, 3), fused=True),
        _case("three sections, interleaved", 1, 2, 1, 4, 80, (16, 12, 12), interleaved=True),
        _case("three sections of half of the channels", 1, 2, 1, 3, 40, (4, 3, 3), fused=True),
        _case("three sections by turns", 2, 4, 2, 3, 16, (4, 2, 2), fused=True, turns=True),
        _case("three sections by turns, partial, pairs interleaved", 1, 3, 1, 4, 72, (10, 8, 7), interleaved=True, turns=True),
        _case("a single section by turns", 1, 2, 1, 3, 24, (9,), turns=True),
        Case("offsets beyond 2**31", _distant),
    ),
    builds=(
        _case("head size 128", 1, 32, 8, 64, 128, (64,), fused=True),
        _case("M-RoPE, head size 128", 1, 28, 4, 64, 128, (16, 24, 24), fused=True),
        _case("M-RoPE by turns, head size 128", 1, 32, 8, 64, 128, (24, 20, 20), fused=True, turns=True),
        _case("64 of 512, interleaved", 1, 64, 1, 64, 512, (32,), interleaved=True),
    ),
)
