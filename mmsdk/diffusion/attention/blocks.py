"""What methods do with blocks: bring tokens into their order and back, average them, and keep the smallest set with enough mass."""

import math

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mmsdk.diffusion.attention.types import Blocks

__all__ = ["arranged", "heads_of", "kept_mass", "kept_most", "pooled", "restored", "scores", "share_of", "touching"]


def arranged(x: Float[Tensor, "b h n d"], blocks: Blocks) -> Float[Tensor, "b h n d"]:
    """The tokens in the order of the blocks; x itself where they stand so already."""
    if blocks.order is None:
        return x
    return x.gather(2, blocks.order[..., None].expand(*x.shape))


def restored(x: Float[Tensor, "b h n d"], blocks: Blocks) -> Float[Tensor, "b h n d"]:
    """The inverse of `arranged`."""
    if blocks.order is None:
        return x
    return torch.empty_like(x).scatter_(2, blocks.order[..., None].expand(*x.shape), x)


def heads_of(x: Shaped[Tensor, "b g *n"], h: int) -> Shaped[Tensor, "b h *n"]:
    """Key-value heads repeated for the query heads that share them."""
    return x if x.shape[1] == h else x.repeat_interleave(h // x.shape[1], 1)


def pooled(x: Float[Tensor, "b h n d"], blocks: Blocks) -> Float[Tensor, "b h blocks d"]:
    """The mean of each block's tokens, which are `arranged`, in float32; 0 where a block is empty. No padding counts."""
    place, real = _places(blocks, x.device)
    near = x.gather(2, place.flatten(2)[..., None].expand(*x.shape[:2], -1, x.shape[3])).float()
    near = near.unflatten(2, place.shape[2:]).masked_fill(~real[..., None], 0)
    means: Tensor = near.sum(3) / real.sum(3).clamp_min(1)[..., None]
    return means


def touching(flags: Bool[Tensor, " n"], blocks: Blocks) -> Bool[Tensor, "#b #h blocks"]:
    """Whether any token of a block, by its own number, is flagged."""
    place, real = _places(blocks, flags.device)
    token = place if blocks.order is None else blocks.order.gather(2, place.flatten(2)).view_as(place)
    return (flags[token] & real).any(3)


def _places(blocks: Blocks, device: torch.device) -> tuple[Int[Tensor, "#b #h blocks size"], Bool[Tensor, "#b #h blocks size"]]:
    """The places of each block, side by side, and which of them are there; others stand for the last token."""
    bounds = blocks.bounds(device).long()
    place = bounds[..., :-1, None] + torch.arange(blocks.size, device=device)
    return place.clamp(max=blocks.length - 1), place < bounds[..., 1:, None]


def scores(query: Float[Tensor, "b h rows d"], keys: Float[Tensor, "b g columns d"]) -> Float[Tensor, "b h rows columns"]:
    """q k^T / sqrt(d) between pooled tokens."""
    products: Tensor = query @ heads_of(keys, query.shape[1]).transpose(2, 3)
    return products / math.sqrt(query.shape[3])


def kept_mass(shares: Float[Tensor, "*b n"], mass: float, least: int = 1) -> Bool[Tensor, "*b n"]:
    """The smallest set of the largest shares whose sum reaches `mass`, and at least `least` of them; of equals the earlier."""
    ranked, order = shares.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(-1) - ranked
    wanted = (before < mass) | (torch.arange(shares.shape[-1], device=shares.device) < least)
    return torch.zeros_like(wanted).scatter_(-1, order, wanted)


def kept_most(values: Float[Tensor, "*b n"], count: int) -> Bool[Tensor, "*b n"]:
    """The `count` largest values; of equals the earlier."""
    order = values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros(values.shape, dtype=torch.bool, device=values.device).scatter_(-1, order, True)


def share_of(share: float, count: int) -> int:
    """ceil(share count), at least 1, of shares as they are written: 1 - 0.7 of 60 is 18 and not 19, whatever floats make of it."""
    return max(1, math.ceil(round(share * count, 6)))
