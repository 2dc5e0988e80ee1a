"""Query-aware choice of pages: nothing is dropped, little is read (Quest, arXiv 2406.10774).

    worth of a page = sum_c max(q_c min_c, q_c max_c)        min, max: of the page's keys, channel by channel

No key of the page has a larger product with the query, so that a page of small worth can hold no token of large weight. The pages of
largest worth are read, exactly.

[published] pages of 16 tokens, the bound, the first two layers read whole. [ours] the heads of a key-value head choose together, by the
largest bound among them, so that a page is read once; the newest page is always among the chosen.

Letters: b rows, h heads, g key-value heads, n pages, m tokens of a page, k chosen pages, d width.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["best", "bounds", "worth"]


def bounds(keys: Float[Tensor, "b g n m d"], valid: Bool[Tensor, "b n m"]) -> tuple[Float[Tensor, "b g n d"], Float[Tensor, "b g n d"]]:
    """The least and the largest of each channel over the real keys of a page; 0 for a page without any."""
    blind, empty = ~valid[:, None, ..., None], ~valid.any(2)[:, None, :, None]
    low = keys.masked_fill(blind, torch.inf).amin(3).masked_fill(empty, 0)
    high = keys.masked_fill(blind, -torch.inf).amax(3).masked_fill(empty, 0)
    return low, high


def worth(query: Float[Tensor, "b h d"], low: Float[Tensor, "b g n d"], high: Float[Tensor, "b g n d"]) -> Float[Tensor, "b g n"]:
    """The largest product that a key of each page may have with any query of its group, in float32.

    max(q low, q high) is q high where q is above 0, else q low: two products of matrices.
    """
    heads = query.float().unflatten(1, (low.shape[1], -1))
    bound = heads.clamp_min(0) @ high.float().transpose(2, 3) + heads.clamp_max(0) @ low.float().transpose(2, 3)
    return bound.amax(2)


def best(worths: Float[Tensor, "b g n"], held: Int[Tensor, "b n"], always: Bool[Tensor, "b n"], pages: int) -> Int[Tensor, "b g k"]:
    """The k = min(pages, n) pages that are read, -1 where a row has fewer: those `always` read first, and the largest worths.

    `held` are the tokens of each page.
    """
    rank = worths.masked_fill(always[:, None], torch.inf).masked_fill((held == 0)[:, None], -torch.inf)
    chosen = rank.topk(min(pages, rank.shape[2]), dim=-1)
    return chosen.indices.masked_fill(chosen.values == -torch.inf, -1)
