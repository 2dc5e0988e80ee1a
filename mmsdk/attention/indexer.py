"""The lightning indexer: which entries of a long memory a query reads (DeepSeek-V3.2, arXiv 2512.02556; DeepSeek-V4, section 2.3.1).

    I(t, e) = sum_h w_h(t) relu(q_h(t) . k_e)            w holds the scales d^-1/2 and h^-1/2

and the query reads the entries of its k largest scores among those that it may see at all: causality comes before the choice. Scores are
made for a tile of entries and a slice of queries at a time and only the best so far are kept, so that a prompt of any length needs the
same memory; the choice is exact. A GPU does it by a kernel, `mmsdk.kernels.ops.indexer`, a slice of queries at a time.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kernels._triton import launchable
from mmsdk.kernels.ops.indexer import indexer

__all__ = ["picks", "scores"]

# A tile of scores, 4 MiB: on a processor, tiles of a sixteenth take twice the time, and larger ones no less.
_QUERIES, _TILE = 128, 8192
_BLOCK = 64


def scores(query: Float[Tensor, "b s h d"], weights: Float[Tensor, "b s h"], keys: Float[Tensor, "b t d"]) -> Float[Tensor, "b s t"]:
    """sum_h w_h relu(q_h . k) in float32."""
    b, s, h, d = query.shape
    products = torch.bmm(query.reshape(b, s * h, d).float(), keys.float().transpose(1, 2)).relu_()
    if h == 1:
        return products.mul_(weights.float())
    return (weights.float()[:, :, None] @ products.view(b, s, h, -1))[:, :, 0]


def picks(
    query: Float[Tensor, "b s h d"],
    weights: Float[Tensor, "b s h"],
    keys: Float[Tensor, "b t d"],
    seen: Int[Tensor, "b s"],
    most: int,
    settled: int = 0,
) -> Int[Tensor, "b s k"]:
    """The k = min(most, t) entries that each query reads, -1 where there are fewer that it may see.

    A query sees the first `seen` entries; `settled` of them are seen by all, which the host knows. With no more than `most` entries
    nothing is scored: all that are seen are read.
    """
    count = keys.shape[1]
    if count <= most:
        entries = torch.arange(count, device=keys.device).expand(*seen.shape, -1)
        return entries.masked_fill(entries >= seen[:, :, None], -1)
    parts = zip(query.split(_QUERIES, 1), weights.split(_QUERIES, 1), seen.split(_QUERIES, 1), strict=True)
    if launchable(query):
        return torch.cat([indexer(asking, heavy, keys, some, most).long() for asking, heavy, some in parts], dim=1)
    return torch.cat([_chosen(*part, keys, most, settled) for part in parts], dim=1)


def _chosen(
    query: Float[Tensor, "b s h d"],
    weights: Float[Tensor, "b s h"],
    seen: Int[Tensor, "b s"],
    keys: Float[Tensor, "b t d"],
    most: int,
    settled: int,
) -> Int[Tensor, "b s k"]:
    """Over all tiles, the best of each joined with the best so far."""
    best: Float[Tensor, "b s k"] = weights.new_empty(*seen.shape, 0, dtype=torch.float32)
    index = seen.new_empty(*seen.shape, 0)
    for start in range(0, keys.shape[1], _TILE):
        tile = keys[:, start : start + _TILE]
        found = scores(query, weights, tile)
        if start + tile.shape[1] > settled:
            entries = torch.arange(start, start + tile.shape[1], device=keys.device)
            found = found.masked_fill(entries >= seen[:, :, None], -torch.inf)
        values, places = _top(found, most)
        best, index = torch.cat((best, values), dim=-1), torch.cat((index, places + start), dim=-1)
        if best.shape[-1] > most:
            best, order = best.topk(most, dim=-1, sorted=False)
            index = index.gather(-1, order)
    return index.masked_fill(best == -torch.inf, -1)


def _top(found: Float[Tensor, "b s t"], most: int) -> tuple[Float[Tensor, "b s k"], Int[Tensor, "b s k"]]:
    """The k = min(most, t) largest. They lie in the k blocks of the largest maxima, which are cheaper to find than they themselves."""
    blocks = found.shape[-1] // _BLOCK
    if most >= blocks or found.shape[-1] % _BLOCK:
        best = found.topk(min(most, found.shape[-1]), dim=-1, sorted=False)
        return best.values, best.indices
    parted = found.unflatten(-1, (blocks, _BLOCK))
    chosen = parted.amax(-1).topk(most, dim=-1, sorted=False).indices
    among = parted.gather(2, chosen[..., None].expand(-1, -1, -1, _BLOCK)).flatten(2)
    best = among.topk(most, dim=-1, sorted=False)
    return best.values, chosen.gather(-1, best.indices // _BLOCK) * _BLOCK + best.indices % _BLOCK
