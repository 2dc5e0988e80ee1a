"""VisionZip: keep the tokens that the encoder attends to, and merge the rest into a few contextual ones.

Source: VisionZip, arXiv 2412.04467. Published: dominant tokens by the class token's attention summed over heads; contextual targets at a
uniform stride over the rest; every other token joins its most similar target by key cosine; a contextual token is its target plus the mean
of those that joined. Ours: the layer is the one that the encoder offers; the published pairs (162+30, 108+20, 54+10) become a share of the
budget, 10 in 64, and at least one token is contextual, so that no token is lost; contextual tokens stand at their targets' places, in
reading order, not at the end; the mean counts a token as many times as it stands for patches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import PluginError
from mmsdk.kernels.ops.assign_and_merge import nearest_centre, weighted_merge
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.ranking import others, rescaled, top
from mmsdk.tokencomp.share import nearest
from mmsdk.tokencomp.similarity import rows_at, unit
from mmsdk.tokencomp.stack import Stack, in_stacks
from mmsdk.tokencomp.types import Compressed, Side
from mmsdk.vision.types import VisualTokens

__all__ = ["VisionZip"]


@dataclass(frozen=True, slots=True)
class VisionZip:
    """`contextual` is the share of the budget that goes to merged tokens."""

    side: ClassVar[Side] = "before"
    asks: ClassVar[bool] = False

    contextual: float = 10 / 64

    def __post_init__(self) -> None:
        if not 0 < self.contextual <= 1:
            raise PluginError(f"visionzip:contextual is a share of the budget in (0, 1], got {self.contextual}")

    def __call__(
        self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget], query: Sequence[Float[Tensor, "_ d"]] | None = None
    ) -> list[Compressed]:
        """Raises InputError for tokens without saliency or keys."""
        return in_stacks("visionzip", tokens, budgets, self._zip)

    def _zip(self, stack: Stack) -> list[Compressed]:
        saliency, keys = stack.saliency(), unit(stack.keys())
        contextual = max(1, nearest(self.contextual, stack.count))
        dominant = top(rescaled(saliency), stack.count - contextual)
        rest = others(dominant, saliency.shape[1])
        # a stride of whole tokens from the first, as published: what does not divide is left over at the end
        targets = rest[:, : contextual * (rest.shape[1] // contextual) : rest.shape[1] // contextual]
        _, match = nearest_centre(keys, rows_at(keys, targets))
        at = torch.cat([dominant, targets], dim=1)
        numbers = torch.arange(stack.count, device=at.device).expand_as(at)
        labels = (match + dominant.shape[1]).scatter(1, at, numbers)
        features = [_added(item, *plan) for item, *plan in zip(stack.items, labels, at, strict=True)]
        return stack.merge(labels, at, features, saliency)


def _added(item: VisualTokens, labels: Int[Tensor, " n"], at: Int[Tensor, " m"]) -> Float[Tensor, "m d"]:
    """Each survivor plus the mean of the tokens that joined it; nothing joins the dominant ones."""
    # the survivors themselves are no members, and what none joined has a mean of 0
    joiners = labels.index_fill(0, at, -1)
    means, _ = weighted_merge(item.features[None], joiners[None], len(at), item.weight[None])
    return item.features[at].float() + means[0]
