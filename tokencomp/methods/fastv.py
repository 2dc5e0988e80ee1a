"""FastV: an image is worth half its tokens after layer 2 of the language model (arXiv 2403.06764).

Published: after K layers (K = 2) visual tokens are ranked by the attention that the last token of the prompt pays them in the last of
these layers, mean over heads; the best go on with their original positions, in their order. Upstream masks the others, or loses the
cache; here they are gone from all later layers and from their caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import ModelError
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.plan import check, untouched
from mmsdk.tokencomp.types import Between, Compressed, Positions
from mmsdk.vision.types import VisualTokens

__all__ = ["FastV"]


@dataclass(frozen=True, slots=True)
class FastV:
    """A `Thinner`: keeps `budget` tokens after `layer` layers (the paper has 2 or 3)."""

    layer: int = 2
    positions: Positions = "keep"

    def enter(self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget]) -> list[Compressed]:
        """Everything."""
        check(tokens, budgets)
        return [untouched(item) for item in tokens]

    def layers(self, depth: int) -> tuple[int, ...]:
        """After `layer` layers. Raises ModelError where there is none left behind them."""
        if not 0 < self.layer < depth:
            raise ModelError(f"fastv drops tokens after layer {self.layer}; a decoder of {depth} layers allows 1 to {depth - 1}")
        return (self.layer,)

    def counts(self, entered: int, budget: Budget) -> tuple[int, ...]:
        """All at once."""
        return (budget.count,)

    def score(self, between: Between) -> Float[Tensor, "b s"]:
        """By the last token's attention in the layer just done."""
        return between.attention(rows="last", layer="done")
