"""CDPruner: keep tokens that are unlike each other, given the question: a determinantal point process weighed by relevance.

Source: CDPruner, arXiv 2506.10967. Published: L(i, j) = rel(i) cos(i, j) rel(j), where rel is the min-max scaled negative of the mean
cosine between image token and text in CLIP's joint space; greedy MAP inference with an incremental Cholesky factor, over all tokens at
once. Ours: `sign`, since the negative suits CLIP's patches, while in the language model's own space the near ones are the relevant ones;
without a question all tokens are equally relevant, and what is left is the unconditional process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.dpp import greedy_dpp
from mmsdk.tokencomp.ranking import rescaled
from mmsdk.tokencomp.relevance import mean_cosine
from mmsdk.tokencomp.similarity import unit
from mmsdk.tokencomp.stack import Stack, in_stacks
from mmsdk.tokencomp.types import Compressed
from mmsdk.vision.types import VisualTokens

__all__ = ["CDPruner"]


@dataclass(frozen=True, slots=True)
class CDPruner:
    """`sign` says whether tokens near the question or far from it in cosine are the relevant ones. Scores are the relevance."""

    sign: Literal["negative", "positive"] = "negative"

    def __call__(
        self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget], query: Float[Tensor, "q d"] | None = None
    ) -> list[Compressed]:
        """`query` are embeddings of the question in the space of the tokens. Raises InputError for a query of another width."""
        return in_stacks("cdpruner", tokens, budgets, partial(self._choose, query=query))

    def _choose(self, stack: Stack, query: Float[Tensor, "q d"] | None) -> list[Compressed]:
        z = unit(stack.features())
        relevance = self._relevance(z, query)
        return stack.keep(greedy_dpp(z, relevance, stack.count), relevance)

    def _relevance(self, z: Float[Tensor, "b n d"], query: Float[Tensor, "q e"] | None) -> Float[Tensor, "b n"]:
        if query is None:
            return torch.ones(z.shape[:2], device=z.device)
        cosine = mean_cosine(z, query)
        return rescaled(-cosine if self.sign == "negative" else cosine)
