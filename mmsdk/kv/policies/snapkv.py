"""What the end of the prompt looks at stays (SnapKV, Li et al., arXiv 2404.14469).

[published] the attention of the last `window` queries of the prompt, averaged over them, smoothed by a mean over `kernel` neighbours and
averaged over the heads that share a key-value head; the tokens of the window stay, and of the others those of the largest mass. Order of
the steps, padding by zeros and defaults are kvpress's. [ours] where the budget is less than the window the newest stay; with an
`interval`, the last queries of the answer take the place of the prompt's, as in kvpress's decoding.
"""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mmsdk.errors import BudgetError
from mmsdk.kv.asked import last_queries, mass
from mmsdk.kv.entries import Entries
from mmsdk.kv.policy import Ask
from mmsdk.kv.scoring import latest_first

__all__ = ["SnapKV"]


@dataclass(frozen=True, slots=True)
class SnapKV:
    """Every key-value head keeps its own tokens. Made for prompts: by default nothing goes while an answer is written."""

    window: int = 64
    kernel: int = 5
    interval: int = 0
    dense: int = 0

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise BudgetError(f"snapkv needs a window of at least 1 and an odd kernel, got window={self.window}, kernel={self.kernel}")

    @property
    def latents(self) -> bool:
        """Only attention counts."""
        return True

    def observe(self, entries: Entries, query: Float[Tensor, "b h s d"], ask: Ask) -> None:
        """Keep the last queries."""
        last_queries(entries, query, ask, self.window)

    def scores(self, entries: Entries, keep: Int[Tensor, " b"]) -> Float[Tensor, "b g t"]:
        """The smoothed mass; the window before all."""
        received = mass(entries)
        order, before = entries.order, entries.lengths[..., None] - self.window
        # what pools is what stands in front of the window: neither it nor padding adds to its neighbours
        front = received.masked_fill((order >= before) | (order < 0), 0)
        pooled = F.avg_pool1d(front, self.kernel, stride=1, padding=self.kernel // 2)
        return latest_first(pooled, order, (order >= before).long())
