"""CDPruner: keep tokens that are unlike each other, given the question: a determinantal point process weighed by relevance.

Source: CDPruner, arXiv 2506.10967. Published: L(i, j) = rel(i) cos(i, j) rel(j), where rel is the min-max scaled negative of the mean
cosine between image token and text in CLIP's joint space; greedy MAP inference with an incremental Cholesky factor, over all tokens at
once. Ours: where there is no tower of text beside the encoder, the space is the language model's: projected tokens and the embeddings of
the question's words; `sign`, since the negative was published for CLIP's patches and need not suit another space; without a question all
tokens are equally relevant, and what is left is the unconditional process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.kernels.ops.dpp_greedy import dpp_greedy
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.ranking import rescaled
from mmsdk.tokencomp.relevance import mean_cosine
from mmsdk.tokencomp.similarity import unit
from mmsdk.tokencomp.stack import Stack, in_stacks
from mmsdk.tokencomp.types import Compressed, Side
from mmsdk.vision.types import VisualTokens

__all__ = ["CDPruner"]


@dataclass(frozen=True, slots=True)
class CDPruner:
    """`sign` says whether tokens near the question or far from it in cosine are the relevant ones. Scores are the relevance."""

    side: ClassVar[Side] = "behind"
    asks: ClassVar[bool] = True

    sign: Literal["negative", "positive"] = "negative"

    def __call__(
        self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget], query: Sequence[Float[Tensor, "_ d"]] | None = None
    ) -> list[Compressed]:
        """`query` are embeddings of each input's question in the space of the tokens. Raises InputError for those of another width."""
        return in_stacks("cdpruner", tokens, budgets, self._choose, query)

    def _choose(self, stack: Stack) -> list[Compressed]:
        z = unit(stack.features())
        relevance = self._relevance(z, stack.query)
        return stack.keep(dpp_greedy(z * relevance[..., None], stack.count), relevance)

    def _relevance(self, z: Float[Tensor, "b n d"], query: Sequence[Float[Tensor, "_ e"]]) -> Float[Tensor, "b n"]:
        if not query:
            return torch.ones(z.shape[:2], device=z.device)
        cosine = mean_cosine(z, query)
        return rescaled(-cosine if self.sign == "negative" else cosine)
