"""What the last token looks at least goes (TOVA, Oren et al., arXiv 2401.06104).

[published] one ranking for all heads of a layer: the attention of the last query, averaged over the heads; while an answer is written,
every new token lets go of one. That the newest token itself always stays is kvpress's rule.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kv.asked import last_queries, mass
from mmsdk.kv.entries import Entries
from mmsdk.kv.policy import Ask

__all__ = ["Tova"]


@dataclass(frozen=True, slots=True)
class Tova:
    """All heads of a layer keep the same tokens."""

    interval: int = 1
    dense: int = 0

    @property
    def latents(self) -> bool:
        """Only attention counts."""
        return True

    def observe(self, entries: Entries, query: Float[Tensor, "b h s d"], ask: Ask) -> None:
        """Keep the last query."""
        last_queries(entries, query, ask, 1)

    def scores(self, entries: Entries, keep: Int[Tensor, " b"]) -> Float[Tensor, "b 1 t"]:
        """The mean over all heads: over the groups, of each group's."""
        newest = entries.order == entries.lengths[..., None] - 1
        return mass(entries).mean(1, keepdim=True).masked_fill(newest, torch.inf)
