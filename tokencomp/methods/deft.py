"""DeFT: the encoder chooses with a reserve, the text chooses again at the decoder's midpoint (arXiv 2609.34861).

Published: before the language model tokens are ranked by the encoder's attention (of the class token, or where there is none that received
in the last block). With K tokens to keep of n, M = min(n, K + ceil(a (n - K))) go in, a = 0.2. At half of the decoder's depth visual keys
are scored by the attention of the text's queries, averaged over heads and over text tokens, and the best K go on. Upstream replays the
prefix for every token it generates; here layers before the midpoint cache M tokens and those behind it K.

Ours: the scoring layer is the last one before the midpoint.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError, ModelError, PluginError
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.plan import check, keep
from mmsdk.tokencomp.ranking import rescaled, top
from mmsdk.tokencomp.share import at_least, nearest
from mmsdk.tokencomp.types import Between, Compressed, Positions
from mmsdk.vision.types import VisualTokens

__all__ = ["DeFT"]


@dataclass(frozen=True, slots=True)
class DeFT:
    """A `Thinner`: `budget` tokens after the share `at` of the layers, chosen from a `reserve` (the paper's a, .1 to .3).

    A reserve of 0 leaves the choice to the encoder, of 1 to the text. Raises PluginError for a share outside [0, 1] or (0, 1).
    """

    reserve: float = 0.2
    at: float = 0.5
    positions: Positions = "keep"

    def __post_init__(self) -> None:
        if not 0 <= self.reserve <= 1 or not 0 < self.at < 1:
            raise PluginError(f"deft takes a reserve in [0, 1] and a cut at a share in (0, 1), not {self.reserve} and {self.at}")

    def enter(self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget]) -> list[Compressed]:
        """The K + ceil(a (n - K)) most salient tokens. Raises InputError where the encoder tells no saliency."""
        check(tokens, budgets)
        return [self._reserved(i, item, budget.count) for i, (item, budget) in enumerate(zip(tokens, budgets, strict=True))]

    def _reserved(self, index: int, item: VisualTokens, count: int) -> Compressed:
        if item.saliency.shape[0] != len(item):
            raise InputError("deft ranks by the encoder's attention, and this encoder tells none", item="saliency", index=index)
        started = time.perf_counter()
        entering = top(rescaled(item.saliency.float()), count + at_least(self.reserve, len(item) - count))
        return keep(item, entering, method="deft", scores=item.saliency, seconds=time.perf_counter() - started)

    def layers(self, depth: int) -> tuple[int, ...]:
        """After half of the layers, rounded half up. Raises ModelError where there is no layer on one of the sides."""
        layer = nearest(self.at, depth)
        if not 0 < layer < depth:
            raise ModelError(f"deft cuts after {layer} layers, and a decoder of {depth} has none on one side")
        return (layer,)

    def counts(self, entered: int, budget: Budget) -> tuple[int, ...]:
        """All at once."""
        return (budget.count,)

    def score(self, between: Between) -> Float[Tensor, "b s"]:
        """By the words' attention in the layer just done."""
        return between.attention(rows="text", layer="done")
