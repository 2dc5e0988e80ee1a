"""DeepSeek sparse attention: each query attends to the k entries that a lightning indexer scores highest (DeepSeek-V3.2, arXiv 2512.02556).

The indexer has a few small heads of its own and one key a token, which the cache holds beside the token's entry. Entries that a query may
not see are out before the choice, so that causality never costs it one of its k; where there are no more than k entries it is attention to
all of them. [published] all of it; the original rotates queries and keys by a Hadamard matrix and scores in fp8, which changes nothing but
the speed, and is left out here as in transformers' deepseek_v32.

A single new token a row, as in decoding, reads its k entries alone. Several each have a choice of their own, and read all entries under a
mask that leaves the others out: that is exact, but saves nothing.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.attention.indexer import scores
from mmsdk.attention.mask import Bias, Everything, Mask, sliced
from mmsdk.errors import ModelError
from mmsdk.kernels._triton import launchable
from mmsdk.kernels.ops.indexer import indexer
from mmsdk.kv.types import LayerView, PagedView, View

__all__ = ["Lightning", "narrowed"]

# Products of a slice of queries that may exist at one time: 16 MiB in float32.
_SLICE = 2**22
_MOST = 1 << 20


@dataclass(frozen=True, slots=True)
class Lightning:
    """The indexer's sizes: `heads` of `width` channels, and the `topk` entries that a query reads. Raises ModelError for others."""

    heads: int
    width: int
    topk: int

    def __post_init__(self) -> None:
        for name in ("heads", "width", "topk"):
            size = getattr(self, name)
            if not 1 <= size <= _MOST:
                raise ModelError(f"indexer: {name} is {size}, it must be from 1 to {_MOST}")


def narrowed(query: Float[Tensor, "b s h e"], weights: Float[Tensor, "b s h"], view: View, mask: Mask, topk: int) -> tuple[LayerView, Mask]:
    """What is left of a view and of its mask when each query sees its `topk` best entries alone.

    The indexer's keys are the view's values. The mask must be of this view.
    """
    keys = _keys(view)
    if isinstance(view, PagedView) and isinstance(mask, Everything):
        # laid side by side, padding has columns, which nobody sees
        mask = Bias.of(view.valid[:, None, None], torch.float32)
    if query.shape[1] == 1:
        index = _best(query, weights, keys, mask, topk)[:, 0]
        return view.picked(index.clamp_min(0)), _picked(mask, index)
    step = max(1, _SLICE // (query.shape[0] * query.shape[2] * keys.shape[1]))
    biases = []
    for start in range(0, query.shape[1], step):
        part = slice(start, start + step)
        own = sliced(mask, start, start + step, keys)
        biases.append(_without(own, _best(query[:, part], weights[:, part], keys, own, topk), keys))
    whole = view.gathered() if isinstance(view, PagedView) else view
    return whole, Bias.both(torch.cat([one.bias for one in biases], dim=2), torch.cat([one.alive for one in biases], dim=2))


def _keys(view: View) -> Float[Tensor, "b t e"]:
    if not isinstance(view, PagedView):
        return view.values[:, 0]
    block, slot = view.homes()
    return view.values[block, slot, 0]


def _best(
    query: Float[Tensor, "b s h e"], weights: Float[Tensor, "b s h"], keys: Float[Tensor, "b t e"], mask: Mask, topk: int
) -> Int[Tensor, "b s k"]:
    """The entries of the largest scores; of a query that sees fewer than k also -1, or some that it does not see, which its mask hides."""
    bias = mask.bias[:, 0] if isinstance(mask, Bias) else None
    if launchable(query):
        (b, s), t = query.shape[:2], keys.shape[1]
        all_seen = torch.full((b, s), t, device=keys.device)
        return indexer(query, weights, keys, all_seen, topk, None if bias is None else bias.expand(b, s, t)).long()
    found = scores(query, weights, keys)
    return (found if bias is None else found + bias).topk(min(topk, found.shape[2]), dim=-1, sorted=False).indices


def _picked(mask: Mask, index: Int[Tensor, "b k"]) -> Mask:
    """The mask of a single query over the entries that it picked."""
    if not isinstance(mask, Bias):
        return Everything()
    bias = mask.bias.expand(len(index), -1, -1, -1).gather(3, index.clamp_min(0)[:, None, None])
    return Bias.both(bias.masked_fill((index < 0)[:, None, None], -torch.inf), mask.alive)


def _without(mask: Mask, index: Int[Tensor, "b s k"], keys: Float[Tensor, "b t e"]) -> Bias:
    """The mask, with everything else out of sight too; queries that see nothing keep a bias of 0."""
    assert isinstance(mask, Bias), "of several queries in order, not all see everything"
    # who sees fewer than k entries reads all of these, the first among them or hidden by the mask
    out = keys.new_ones(*index.shape[:2], keys.shape[1], dtype=torch.bool).scatter(2, index.clamp_min(0), False)[:, None]
    return Bias.both(mask.bias.masked_fill(out & mask.alive, -torch.inf), mask.alive)
