"""How likely the model found what was said, and what it found likelier: the logarithms of probabilities.

They are of the model's own distribution, before penalties, temperature and what takes tokens out: as in OpenAI's API and in vLLM.

Letters: b rows, v words of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["Likely", "Said", "likelihoods"]


@dataclass(frozen=True, slots=True)
class Likely:
    """A token that might have been said, and the natural logarithm of its probability."""

    id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Said:
    """A token that was said, the logarithm of its probability, and the likeliest in its place, in order: it may be among them."""

    id: int
    logprob: float
    top: tuple[Likely, ...]


def likelihoods(logits: Float[Tensor, "b v"], ids: Int[Tensor, " b"], most: Sequence[int]) -> list[tuple[Said, ...]]:
    """Of each row the token that it says with at most so many likelier ones; nothing where `most` is 0.

    Nothing is computed where no row asks; else the host waits once more.
    """
    if not any(most):
        return [()] * len(most)
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, ids.clamp_min(0)[:, None])[:, 0].tolist()
    top = logprobs.topk(min(max(most), logits.shape[-1]), dim=-1)
    likeliest = [[Likely(*one) for one in zip(*row, strict=True)] for row in zip(top.indices.tolist(), top.values.tolist(), strict=True)]
    rows = zip(ids.tolist(), chosen, likeliest, most, strict=True)
    return [(Said(token, logprob, tuple(row[:count])),) if count else () for token, logprob, row, count in rows]
