"""How much of the full token set a compressed one still says, measured per input without running the language model.

L2-NQE is sum_i |x_i - r_i|^2 / sum_i |x_i - mean(x)|^2 where r_i represents token i: its group's mean where it was merged, the
nearest kept token where it was dropped. Cosine coverage is the share of tokens that have a kept token at cosine tau or nearer
(tau = 0.9). Both measures are published with SimpleCluster; the normaliser of the first is a reconstruction.

Compressibility C = 1 - |X - Xhat|^2 / |X|^2 is what a basis keeps of tokens X. Learnability is told by how far the norms of coded tokens
differ, largest to median, and by their mean cosine to the mean of X: coordinates that are alike, and like tokens, are easier to learn to
read. Both are reconstructions after Braco, which names the two and gives no formula.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.tokencomp.types import Compressed
from mmsdk.vision.types import VisualTokens

__all__ = ["Fidelity", "Learnability", "best_cosine", "compressibility", "fidelity", "learnability", "preserved"]

# Rows of the similarity matrix held at once: bounds memory whatever the length of a clip.
BLOCK = 1024
# Products of numbers that measuring an input may take; of more tokens every second, third, ... is looked at.
MOST = 2**31


@dataclass(frozen=True, slots=True)
class Fidelity:
    """`nqe` is 0 for a perfect copy and 1 for the mean alone; `coverage` and `cosine` are 1 for a perfect copy."""

    nqe: float
    coverage: float
    cosine: float


def best_cosine(features: Float[Tensor, "n d"], kept: Float[Tensor, "k d"]) -> Float[Tensor, " n"]:
    """The cosine of each token to its most similar kept token, in float32; a zero vector has cosine 0 to everything."""
    target = F.normalize(kept.float(), dim=1).T
    rows = [(F.normalize(block.float(), dim=1) @ target).amax(dim=1) for block in features.split(BLOCK)]
    return torch.cat(rows).clamp(-1.0, 1.0)


def fidelity(full: VisualTokens, compressed: Compressed, tau: float = 0.9) -> Fidelity:
    """Compare the survivors with the tokens they came from."""
    return preserved(full.features, compressed.tokens.features, compressed.audit.assignment, tau)


def preserved(x: Float[Tensor, "n d"], survivors: Float[Tensor, "k d"], assignment: Int[Tensor, " n"], tau: float = 0.9) -> Fidelity:
    """The same of features alone; `assignment` is the survivor that each token became part of, or -1.

    Where so much is kept of so many that it would take long, of tokens at even distances alone.
    """
    every = -(-x.numel() * len(survivors) // MOST)
    source, kept, group = x[:: max(every, 1)].float(), survivors.float(), assignment[:: max(every, 1)].clone()
    dropped = group < 0
    group[dropped] = torch.cat([torch.cdist(block, kept).argmin(dim=1) for block in source[dropped].split(BLOCK)])
    represented = kept[group]
    error = (source - represented).square().sum()
    spread = (source - source.mean(dim=0)).square().sum()
    # tokens that are all alike have no spread; then any error at all is reported as it stands
    nqe = error / spread.clamp_min(torch.finfo(torch.float32).tiny) if spread > 0 else error
    cosine = best_cosine(source, kept)
    return Fidelity(float(nqe), float((cosine >= tau).float().mean()), float(cosine.mean()))


@dataclass(frozen=True, slots=True)
class Learnability:
    """`dispersion` is 1 where all norms are equal; `alignment` is 1 where all tokens point to the mean of the uncompressed ones."""

    dispersion: float
    alignment: float


def compressibility(x: Float[Tensor, "n d"], approximation: Float[Tensor, "n d"]) -> float:
    """The share of the energy of x that an approximation has: 1 for a perfect copy, also of nothing, 0 for zeros."""
    energy, missed = x.float().square().sum(), (x.float() - approximation.float()).square().sum()
    return float(1 - missed / energy) if energy > 0 else float(missed == 0)


def learnability(tokens: Float[Tensor, "k d"], x: Float[Tensor, "n d"]) -> Learnability:
    """Of coded tokens, beside the tokens x that they stand for."""
    norms = tokens.float().norm(dim=1)
    cosine = F.normalize(tokens.float(), dim=1) @ F.normalize(x.float().mean(dim=0), dim=0)
    return Learnability(float(norms.max() / norms.median().clamp_min(torch.finfo(torch.float32).tiny)), float(cosine.mean()))
