"""PruMerge: keep the tokens that the encoder attends to, each enriched by its neighbours, and one token that sums up the rest.

Source: LLaVA-PruMerge, arXiv 2403.15388. Published: tokens by the class token's attention; to each kept token is added the
attention-weighted sum, not normalised, of the 32 others nearest by key cosine; one more token is the attention-weighted sum of those that
were pruned; PruMerge+ adds spatially uniform samples. Ours: the number of tokens is the budget (published: outliers of the attention, a
different number for each image); the summing token takes one place of it and stands where the most attended pruned token stood (a budget
of one has no room for it: then all that is pruned is booked to the one kept); the layer is the one that the encoder offers; uniform samples
are spaced evenly in reading order and take a share of the budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import PluginError
from mmsdk.kernels.ops.pair_similarity import pair_similarity
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.ranking import first_best, others, rescaled, top
from mmsdk.tokencomp.share import at_most
from mmsdk.tokencomp.similarity import ENTRIES, rows_at, unit
from mmsdk.tokencomp.stack import Stack, in_stacks
from mmsdk.tokencomp.types import Compressed, Side
from mmsdk.vision.types import VisualTokens

__all__ = ["PruMerge"]


@dataclass(frozen=True, slots=True)
class PruMerge:
    """`neighbours` enrich each kept token; `uniform` is the share of the kept ones that are spaced evenly (above 0: PruMerge+)."""

    side: ClassVar[Side] = "before"
    asks: ClassVar[bool] = False

    neighbours: int = 32
    uniform: float = 0.0

    def __post_init__(self) -> None:
        if self.neighbours < 0 or not 0 <= self.uniform <= 1:
            raise PluginError(
                f"prumerge takes neighbours >= 0 and uniform in [0, 1], got neighbours={self.neighbours}, uniform={self.uniform}"
            )

    def __call__(
        self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget], query: Sequence[Float[Tensor, "_ d"]] | None = None
    ) -> list[Compressed]:
        """Raises InputError for tokens without saliency or keys."""
        return in_stacks("prumerge", tokens, budgets, self._prune)

    def _prune(self, stack: Stack) -> list[Compressed]:
        saliency, n = stack.saliency(), len(stack.items[0])
        scores = rescaled(saliency)
        kept = top(self._with_uniform(scores, max(1, stack.count - 1)), max(1, stack.count - 1))
        pruned = others(kept, n)
        near = _nearest(unit(stack.keys()), kept, min(self.neighbours, n - 1))
        attended = first_best(scores.gather(1, pruned))[:, None]
        at = torch.cat([kept, pruned.gather(1, attended)], dim=1)[:, : stack.count]
        numbers = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
        labels = torch.full_like(saliency, stack.count - 1, dtype=torch.int64).scatter(1, kept, numbers)
        plans = zip(stack.items, saliency, kept, near, pruned, strict=True)
        return stack.merge(labels, at, [_enriched(*plan)[: stack.count] for plan in plans], saliency)

    def _with_uniform(self, scores: Float[Tensor, "b n"], count: int) -> Float[Tensor, "b n"]:
        """Scores in which the evenly spaced samples come before everything else."""
        samples = at_most(self.uniform, count)
        spaced = (torch.arange(samples, device=scores.device) * 2 + 1) * scores.shape[1] // max(1, 2 * samples)
        return scores.index_fill(1, spaced, torch.inf)


def _nearest(z: Float[Tensor, "b n e"], kept: Int[Tensor, "b m"], count: int) -> Int[Tensor, "b m k"]:
    """The `count` other tokens most similar to each kept one."""
    rows = max(1, ENTRIES // (z.shape[0] * z.shape[1]))
    found = []
    for part in kept.split(rows, dim=1):
        cosine = pair_similarity(rows_at(z, part), z)
        found.append(top(cosine.scatter(2, part[..., None], -torch.inf), count))
    return torch.cat(found, dim=1)


def _enriched(
    item: VisualTokens, saliency: Float[Tensor, " n"], kept: Int[Tensor, " m"], near: Int[Tensor, "m k"], pruned: Int[Tensor, " p"]
) -> Float[Tensor, "m1 d"]:
    """The kept tokens with what their neighbours add, and behind them the sum of the pruned ones."""
    x = item.features.float()
    rows = max(1, ENTRIES // len(item))
    added = [part.new_zeros(len(part), len(item), dtype=x.dtype).scatter(1, part, saliency[part]) @ x for part in near.split(rows)]
    return torch.cat([x[kept] + torch.cat(added), (saliency[pruned] @ x[pruned])[None]])
