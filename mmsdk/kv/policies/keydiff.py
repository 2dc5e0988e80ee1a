"""Keys that are like no other stay (KeyDiff, Park et al., arXiv 2504.15364).

[published] the worth of a key is how little it resembles the anchor, the mean of all keys of its head after each was brought to length 1:
worth = -cos(k, mean(k / |k|)). No query is looked at, so that fused attention is never left. The formula is kvpress's. [ours] the newest
token always stays; while an answer is written the anchor is taken anew at every eviction, every `interval` tokens as kvpress does.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mmsdk.kv.entries import Entries

__all__ = ["KeyDiff"]


@dataclass(frozen=True, slots=True)
class KeyDiff:
    """Every key-value head keeps its own tokens."""

    interval: int = 512
    dense: int = 0

    def scores(self, entries: Entries, keep: Int[Tensor, " b"]) -> Float[Tensor, "b g t"]:
        """Minus the cosine to the anchor."""
        keys, valid = entries.keys.float(), entries.valid
        unit = F.normalize(keys, dim=-1).masked_fill(~valid[..., None], 0)
        anchor = unit.sum(2, keepdim=True) / entries.lengths[..., None, None]
        newest = entries.order == entries.lengths[..., None] - 1
        return (-F.cosine_similarity(keys, anchor, dim=-1)).masked_fill(newest, torch.inf)
