"""P4Q: choose tokens by what is left of them after quantisation, so that a quantised model is given tokens it can still tell apart.

Source: P4Q, arXiv 2609.34867. Published (abstract; there is no code): before the language model a selector takes its statistics from
fake-quantised copies of the projected tokens, and the model is calibrated on the tokens that this same selector keeps. Ours, a
reconstruction: everything else. Copies are rounded to `bits` with a step per token, or per input as the deployed scheme may have it; from
them come relevance (cosine to the mean of the question), saliency (z-score of the norm) and diversity; both weights scaled to [0, 1];
quality r^w a^(1-w); a determinantal point process as in CDPruner; the tokens kept are the originals. Nothing here is claimed to reach the
paper's figures.

Calibration belongs to weight quantisation: it runs the model on what this same object keeps, and records its fields and the budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import PluginError
from mmsdk.kernels.ops.dpp_greedy import dpp_greedy
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.fake_quant import fake_quantise
from mmsdk.tokencomp.ranking import rescaled
from mmsdk.tokencomp.relevance import cosine_to_mean
from mmsdk.tokencomp.similarity import unit
from mmsdk.tokencomp.stack import Stack, in_stacks
from mmsdk.tokencomp.types import Compressed, Side
from mmsdk.vision.types import VisualTokens

__all__ = ["P4Q"]


@dataclass(frozen=True, slots=True)
class P4Q:
    """`bits` of the activations, one `scale` per token or tensor, and the weight w of `relevance` against saliency. Scores are quality."""

    side: ClassVar[Side] = "behind"
    asks: ClassVar[bool] = True

    bits: int = 4
    scale: Literal["token", "tensor"] = "token"
    relevance: float = 0.5

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 16 or not 0 <= self.relevance <= 1:
            raise PluginError(f"p4q takes bits in [2, 16] and relevance in [0, 1], got bits={self.bits}, relevance={self.relevance}")

    def __call__(
        self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget], query: Sequence[Float[Tensor, "_ d"]] | None = None
    ) -> list[Compressed]:
        """`query` are embeddings of each input's question in the space of the tokens. Raises InputError for those of another width."""
        return in_stacks("p4q", tokens, budgets, self._choose, query)

    def _choose(self, stack: Stack) -> list[Compressed]:
        copies = fake_quantise(stack.features(), self.bits, self.scale)
        z = unit(copies)
        quality = self._quality(copies.norm(dim=2), z, stack.query)
        return stack.keep(dpp_greedy(z * quality[..., None], stack.count), quality)

    def _quality(
        self, norms: Float[Tensor, "b n"], z: Float[Tensor, "b n d"], query: Sequence[Float[Tensor, "_ e"]]
    ) -> Float[Tensor, "b n"]:
        """r^w a^(1-w); without a question all tokens are equally relevant. The z-score of the norm vanishes in the scaling to [0, 1]."""
        relevance = cosine_to_mean(z, query) if query else torch.zeros_like(norms)
        return rescaled(relevance) ** self.relevance * rescaled(norms) ** (1 - self.relevance)
