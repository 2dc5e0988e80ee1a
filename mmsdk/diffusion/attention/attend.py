"""Attention over what a method chose: the Triton kernel on a GPU, gathered blocks on a processor, torch's own where all is read."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mmsdk.diffusion.attention.blocks import arranged, heads_of, restored
from mmsdk.diffusion.attention.gathered import gathered
from mmsdk.diffusion.attention.types import Blocks, Choice, Everything, Selection
from mmsdk.errors import InputError
from mmsdk.kernels._triton import launchable
from mmsdk.kernels.ops.block_sparse import block_sparse, listed

__all__ = ["attend"]


def attend(
    query: Float[Tensor, "b h s d"],
    keys: Float[Tensor, "b g t d"],
    values: Float[Tensor, "b g t d"],
    choice: Choice,
    row_order: Int[Tensor, "b h rows"] | None = None,
) -> Float[Tensor, "b h s d"]:
    """softmax(q k^T / sqrt(d)) v over the chosen blocks, plus the choice's residual, in the order in which the queries were given.

    A query that reads nothing gets 0. `row_order` (`mmsdk.diffusion.attention.wave_align`) is what the kernel's programs go by; a processor
    needs none. Raises InputError where the choice was made for other lengths or heads.
    """
    if isinstance(choice, Everything):
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=query.shape[1] != keys.shape[1])
    _check(query, keys, choice)
    h = query.shape[1]
    shared = choice.keys
    if any(x is not None and x.shape[1] not in (1, keys.shape[1]) for x in (shared.order, shared.starts)):
        keys, values = heads_of(keys, h), heads_of(values, h)
    q, k, v = arranged(query, choice.queries), arranged(keys, shared), arranged(values, shared)
    plain = choice.queries.order is None
    out = _over(q, k, v, choice, row_order, choice.residual if plain else None)
    if plain or choice.residual is None:
        return restored(out, choice.queries)
    return (restored(out, choice.queries).float() + choice.residual.float()).to(query.dtype)


def _over(q: Tensor, k: Tensor, v: Tensor, choice: Selection, row_order: Tensor | None, residual: Tensor | None) -> Tensor:
    scale = q.shape[3] ** -0.5
    if not launchable(q):
        out = gathered(q, k, v, choice.mask, choice.queries, choice.keys, scale)
        return out if residual is None else (out.float() + residual.float()).to(out.dtype)
    counts, blocks = listed(choice.mask)
    starts = (_starts(choice.queries, q), _starts(choice.keys, k))
    return block_sparse(q, k, v, counts, blocks, (choice.queries.size, choice.keys.size), scale, *starts, row_order, residual)[0]


def _starts(blocks: Blocks, x: Tensor) -> Tensor | None:
    return None if blocks.starts is None else blocks.starts.expand(*x.shape[:2], -1)


def _check(query: Tensor, keys: Tensor, choice: Selection) -> None:
    (s, t), made = (query.shape[2], keys.shape[2]), (choice.queries.length, choice.keys.length)
    if made != (s, t):
        raise InputError(f"it was made for {made[0]} queries and {made[1]} keys; there are {s} and {t}", item="choice")
    wanted = torch.Size((*query.shape[:2], choice.queries.count, choice.keys.count))
    if choice.mask.shape != wanted:
        raise InputError(f"its mask is {list(choice.mask.shape)}; rows, heads and blocks make it {list(wanted)}", item="choice")
