"""DivPrune: keep the tokens whose least distance to one another is greedily the largest.

Source: DivPrune, arXiv 2503.02175. Published: max-min diversity on cosine distance; the first token is the one with the largest
second-smallest distance (the smallest is that to itself), each next one the token with the largest least distance to those chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from mmsdk.kernels.ops.farthest_point import farthest_point
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.ranking import first_best
from mmsdk.tokencomp.similarity import nearest_other, unit
from mmsdk.tokencomp.stack import Stack, in_stacks
from mmsdk.tokencomp.types import Compressed, Side
from mmsdk.vision.types import VisualTokens

__all__ = ["DivPrune"]


@dataclass(frozen=True, slots=True)
class DivPrune:
    """Prunes by diversity alone; no knobs. A token's score is its distance to the most similar other one."""

    side: ClassVar[Side] = "before"
    asks: ClassVar[bool] = False

    def __call__(
        self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget], query: Sequence[Float[Tensor, "_ d"]] | None = None
    ) -> list[Compressed]:
        return in_stacks("divprune", tokens, budgets, _choose)


def _choose(stack: Stack) -> list[Compressed]:
    z = unit(stack.features())
    distance = 1 - nearest_other(z)
    return stack.keep(farthest_point(z, first_best(distance), stack.count), distance)
