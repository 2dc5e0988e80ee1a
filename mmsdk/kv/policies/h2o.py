"""Heavy hitters and the last tokens (H2O, Zhang et al., arXiv 2306.14048).

[published] a token's worth is all the attention that it has received so far; half of the budget are the last tokens, half the heaviest of
the others; every new token lets go of one. [ours] of an odd budget the last tokens have the larger half; heads that share a key-value
head share a mean, as in kvpress; sums are taken over the blocks of a prompt's queries, so that no matrix of attention is ever there.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kv.asked import received_by_head
from mmsdk.kv.entries import Entries
from mmsdk.kv.policy import Ask
from mmsdk.kv.scoring import latest_first

__all__ = ["H2O"]


@dataclass(frozen=True, slots=True)
class H2O:
    """Every key-value head keeps its own tokens. Reading a prompt costs about as much as attending to it once more."""

    interval: int = 1
    dense: int = 0

    @property
    def latents(self) -> bool:
        """Only attention counts."""
        return True

    def observe(self, entries: Entries, query: Float[Tensor, "b h s d"], ask: Ask) -> None:
        """Add what the new tokens look at."""
        asking = (ask.positions >= 0).sum(1)
        received = received_by_head(entries, query, ask.positions, newest=True) * asking[:, None, None]
        entries.columns["mass"] = entries.columns.get("mass", torch.zeros_like(received)) + received

    def scores(self, entries: Entries, keep: Int[Tensor, " b"]) -> Float[Tensor, "b g t"]:
        """The sums; before all, the last half of the budget."""
        recent = (keep - keep // 2)[:, None, None]
        return latest_first(entries.columns["mass"], entries.order, (entries.order >= entries.lengths[..., None] - recent).long())
