"""VisPruner: half of the budget goes to the tokens that the encoder attends to, half to what is left after removing duplicates.

Source: VisPruner, arXiv 2412.01818. Published: half of the budget by the attention of the class token, or the mean attention where there is
none; from the rest, alternating tokens form two sets, and the 8 tokens of the first that are most similar to some token of the second
are removed, again and again until the budget is met. Ours: the rest is kept in reading order between the steps; the layer is the one that
the encoder offers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import PluginError
from mmsdk.kernels.ops.drop_twins import drop_twins
from mmsdk.kernels.ops.pair_similarity import pair_similarity
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.ranking import others, rescaled, top
from mmsdk.tokencomp.share import at_most
from mmsdk.tokencomp.similarity import ENTRIES, best_match, few, rows_at, unit
from mmsdk.tokencomp.stack import Stack, in_stacks
from mmsdk.tokencomp.types import Compressed, Side
from mmsdk.vision.types import VisualTokens

__all__ = ["VisPruner"]


@dataclass(frozen=True, slots=True)
class VisPruner:
    """`important` is the share of the budget that attention chooses, `step` how many duplicates are removed at a time."""

    side: ClassVar[Side] = "before"
    asks: ClassVar[bool] = False

    important: float = 0.5
    step: int = 8

    def __post_init__(self) -> None:
        if not 0 <= self.important <= 1 or self.step < 1:
            raise PluginError(f"vispruner takes important in [0, 1] and step >= 1, got important={self.important}, step={self.step}")

    def __call__(
        self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget], query: Sequence[Float[Tensor, "_ d"]] | None = None
    ) -> list[Compressed]:
        """Raises InputError for tokens without saliency."""
        return in_stacks("vispruner", tokens, budgets, self._choose)

    def _choose(self, stack: Stack) -> list[Compressed]:
        saliency = stack.saliency()
        important = top(rescaled(saliency), at_most(self.important, stack.count))
        rest = others(important, saliency.shape[1])
        diverse = _without_duplicates(unit(stack.features()), rest, stack.count - important.shape[1], self.step)
        return stack.keep(torch.cat([important, diverse], dim=1), saliency)


def _without_duplicates(z: Float[Tensor, "b n d"], rest: Int[Tensor, "b r"], count: int, step: int) -> Int[Tensor, "b k"]:
    """`count` of the tokens `rest`: at each step the tokens at even places that have the nearest twins at odd places go."""
    if count == 0:
        return rest[:, :0]
    # where there are too many for all pairs of an input to be held, the first rounds go by slices
    while rest.shape[1] > count and not few(1, rest.shape[1]):
        even, odd = rest[:, ::2], rest[:, 1::2]
        near, _ = best_match(rows_at(z, even), rows_at(z, odd))
        # of equal twins the earlier stays
        stays = top(-near, even.shape[1] - min(step, rest.shape[1] - count, even.shape[1]))
        rest = torch.cat([even.gather(1, stays), odd], dim=1).sort(dim=1).values
    if rest.shape[1] == count:
        return rest
    some = max(1, ENTRIES // rest.shape[1] ** 2)
    parts = rows_at(z, rest).split(some)
    return rest.gather(1, torch.cat([drop_twins(pair_similarity(part, part), count, step) for part in parts]))
