"""PyramidDrop: fewer visual tokens in every stage of the language model (arXiv 2410.17247).

Published: the decoder's layers form four equal stages (cuts after 8, 16 and 24 of 32); at the end of a stage visual tokens are ranked by
the attention of the last token of the instruction, recomputed with the next layer's query and key projections, mean over heads, and a
constant share of them stays (one half: .5, .25, .125 of all). What is left is counted anew, also while decoding.

The budget is what the last stage keeps, and every stage keeps the same share of the one before it: "pyramiddrop:0.125" is the published
setting.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import ModelError, PluginError
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.plan import check, untouched
from mmsdk.tokencomp.types import Between, Compressed, Positions
from mmsdk.vision.types import VisualTokens

__all__ = ["PyramidDrop"]


@dataclass(frozen=True, slots=True)
class PyramidDrop:
    """A `Thinner`: `stages` equal stages, the last of which has `budget` tokens. Raises PluginError for fewer than two stages."""

    stages: int = 4
    positions: Positions = "compact"

    def __post_init__(self) -> None:
        if self.stages < 2:
            raise PluginError(f"pyramiddrop needs at least 2 stages, not {self.stages}")

    def enter(self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget]) -> list[Compressed]:
        """Everything."""
        check(tokens, budgets)
        return [untouched(item) for item in tokens]

    def layers(self, depth: int) -> tuple[int, ...]:
        """The ends of all stages but the last. Raises ModelError where a stage would have no layer."""
        if depth < self.stages:
            raise ModelError(f"pyramiddrop cannot divide a decoder of {depth} layers into {self.stages} stages; lower stages")
        return tuple(depth * stage // self.stages for stage in range(1, self.stages))

    def counts(self, entered: int, budget: Budget) -> tuple[int, ...]:
        """A geometric descent, rounded half up."""
        cuts, share = self.stages - 1, budget.count / entered
        steps = (int(entered * share ** (cut / cuts) + 0.5) for cut in range(1, cuts))
        return (*(max(step, budget.count) for step in steps), budget.count)

    def score(self, between: Between) -> Float[Tensor, "b s"]:
        """By the last token's attention, as the next layer's projections see it."""
        return between.attention(rows="last", layer="next")
