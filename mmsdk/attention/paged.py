"""One new token of each row over all that its row holds in a paged cache.

On a processor a single row is attended to where it lies: its tokens are a few stretches of memory, each of which torch's fused kernel
reads in place. Parts are merged by their log-sum-exps,

    lse = log sum_i exp(lse_i),   out = sum_i out_i exp(lse_i - lse),

which is exact up to the rounding of float32 (FlashAttention, arXiv 2205.14135, merges its tiles in the same way). Several rows are first
laid side by side and then attended to in one call, since a call for each row costs more than the copy.

Where Triton runs, all rows are attended to where they lie, blocks that are kept in fewer bits as codes (`mmsdk.kernels.ops.paged_decode`).
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mmsdk.attention.launch import launches
from mmsdk.kernels.ops.paged_decode import paged_decode
from mmsdk.kv.types import Fronts, PagedView

__all__ = ["over_pages", "readable"]


def readable(query: Float[Tensor, "b h 1 d"], view: PagedView) -> bool:
    """Whether pages are read in place where this query is.

    By the kernel, if no gradient is wanted, which it has none of; on a processor by torch, of exact blocks. Elsewhere a gather costs less
    than a call for each row.
    """
    return _launches(query, view) or (query.device.type == "cpu" and not view.older)


def _launches(query: Float[Tensor, "b h 1 d"], view: PagedView) -> bool:
    return view.keys.shape == view.values.shape and launches(query, view.keys, view.values)


def over_pages(query: Float[Tensor, "b h 1 d"], view: PagedView) -> Float[Tensor, "b h 1 d"]:
    """softmax(q k^T / sqrt(d)) v over all of each row; a row that holds nothing gives 0."""
    if _launches(query, view):
        older = view.older[0] if view.older else None
        where = view.keys, view.values, view.table, view.fronts.counts
        return paged_decode(query[:, :, 0], *where, query.shape[3] ** -0.5, older=older)[0].unsqueeze(2)
    g = view.keys.shape[2]
    # the queries that share a key-value head stand below one another, so that keys are not expanded
    shared = query.unflatten(1, (g, -1)).squeeze(3)
    keys, values = view.keys.flatten(0, 1), view.values.flatten(0, 1)
    out = _row(shared[0], keys, values, view.stretches[0]) if len(shared) == 1 else _rows(shared, keys, values, view.fronts)
    return out.reshape(query.shape)


def _rows(
    query: Float[Tensor, "b g r d"], keys: Float[Tensor, "slots g d"], values: Float[Tensor, "slots g d"], fronts: Fronts
) -> Float[Tensor, "b g r d"]:
    if not max(fronts.lengths):
        return torch.zeros_like(query)
    keys, values = (pool.index_select(0, fronts.slots).unflatten(0, (len(query), -1)).transpose(1, 2) for pool in (keys, values))
    out = F.scaled_dot_product_attention(query, keys, values, fronts.bias)
    if min(fronts.lengths):
        return out
    return out.masked_fill(torch.tensor(fronts.lengths)[:, None, None, None] == 0, 0)


def _row(
    query: Float[Tensor, "g r d"],
    keys: Float[Tensor, "slots g d"],
    values: Float[Tensor, "slots g d"],
    stretches: tuple[tuple[int, int], ...],
) -> Float[Tensor, "g r d"]:
    parts = [[pool[start:stop].transpose(0, 1)[None] for pool in (keys, values)] for start, stop in stretches]
    if not parts:
        return torch.zeros_like(query)
    if len(parts) == 1:
        ((key, value),) = parts
        return F.scaled_dot_product_attention(query[None], key, value)[0]
    # torch keeps the log-sum-exp for its own backward pass and has no public name for it
    results = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query[None], *part) for part in parts]
    shares = torch.stack([lse[0] for _, lse in results]).softmax(0)
    outs = torch.stack([out[0] for out, _ in results])
    return (outs * shares[..., None]).sum(0).to(query.dtype)
