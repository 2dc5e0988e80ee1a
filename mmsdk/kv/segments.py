"""Segments of what was read: of which kind they are, what of them is worth keeping, and which gives way (`mmsdk.kv.policies.thinkv`).

Kinds are numbers by worth: 0 a transition, 1 execution, 2 reasoning. A segment stands on a level, which says how many tokens it keeps.

Letters: b rows, t entries, n segments, m tokens of a segment, g key-value heads, d width.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from mmsdk.kernels.ops.farthest_point import farthest_point

__all__ = ["KEEPS", "SEGMENT", "fitted", "kinds", "lowered", "ranks", "sparsity"]

SEGMENT = 128
KEEPS = (SEGMENT, 64, 32, 16, 8, 4)
"""Tokens that a segment keeps after so many transitions."""

_FAINT = 0.01


def sparsity(weights: Float[Tensor, "*b t"], seen: Bool[Tensor, "*b t"]) -> Float[Tensor, "*b"]:
    """The share of the entries that a query sees whose weight is less than a hundredth of the largest; 0 where it sees nothing."""
    faint = (weights < _FAINT * weights.masked_fill(~seen, 0).amax(-1, keepdim=True)) & seen
    return faint.sum(-1) / seen.sum(-1).clamp_min(1)


def kinds(found: Float[Tensor, "*b"], borders: tuple[float, float]) -> Int[Tensor, "*b"]:
    """0, a transition, above the second border; 1, execution, below the first; 2, reasoning, between them. As numbers, by worth."""
    low, high = borders
    return torch.where(found >= high, 0, torch.where(found < low, 1, 2))


def ranks(keys: Float[Tensor, "b g m d"], valid: Bool[Tensor, "b m"]) -> Int[Tensor, "b m"]:
    """In which order a segment's tokens are kept: those first that are least like all before them, from the last token on.

    Keys of all heads, each head's of length 1, are compared together. The first c ranks are what c tokens are kept as, for any c; what is
    not real comes last.
    """
    shaped = F.normalize(keys.float(), dim=-1).transpose(1, 2).flatten(2)
    # a zero vector is like nothing, and would come first
    unit = torch.where(valid[..., None], F.normalize(shaped, dim=-1), 0)
    last = (valid.cumsum(1).argmax(1)).long()
    order = farthest_point(unit, last, keys.shape[2])
    # real ones before the others, each kind in its order
    places = torch.argsort((~valid).gather(1, order).to(torch.uint8), dim=1, stable=True)
    order = order.gather(1, places)
    return torch.empty_like(order).scatter_(1, order, torch.arange(keys.shape[2], device=keys.device).expand_as(order).contiguous())


def lowered(levels: Int[Tensor, "b n"], new: Int[Tensor, "b k"]) -> Int[Tensor, "b n"]:
    """Levels of earlier segments (places in KEEPS) after new ones of these kinds have come: one lower for each that is a transition."""
    # what was dropped for want of room stays dropped
    return torch.maximum(levels, (levels + (new == 0).sum(1, keepdim=True)).clamp_max(len(KEEPS) - 1))


def fitted(levels: Int[Tensor, "b n"], kind: Int[Tensor, "b n"], held: Int[Tensor, "b n"], room: Int[Tensor, " b"]) -> Int[Tensor, "b n"]:
    """Levels at which a row keeps at most `room` tokens, lowered no further than needed, and beyond the last one to nothing.

    `held` are the tokens that a segment has at most. Step by step the segment gives way that keeps most for its worth: transitions before
    execution before reasoning by a level each, and of equal ones the older. Segments that hold nothing stay as they are.
    """
    keeps = torch.tensor([*KEEPS, 0], device=levels.device)
    steps = torch.arange(len(KEEPS), device=levels.device)
    sizes = torch.minimum(keeps, held[..., None])
    freed = sizes.diff(dim=-1).neg()
    can = (steps >= levels[..., None]) & (held > 0)[..., None]
    # lower levels later; a kind that is worth more counts as if it were that much lower already; the older of equals first
    rank = ((steps + kind[..., None]) * levels.shape[1] + torch.arange(levels.shape[1], device=levels.device)[:, None]).masked_fill(
        ~can, torch.iinfo(torch.long).max
    )
    order = rank.flatten(1).argsort(dim=1)
    gains = freed.masked_fill(~can, 0).flatten(1).gather(1, order)
    over = sizes.gather(2, levels[..., None])[..., 0].sum(1, keepdim=True) - room[:, None]
    taken = torch.zeros_like(order, dtype=torch.bool).scatter_(1, order, gains.cumsum(1) - gains < over).view_as(can) & can
    return levels + taken.sum(2)
