"""ToMe: merge tokens in every block of the vision transformer ("Token Merging: Your ViT But Faster", arXiv 2210.09461).

Published: between attention and MLP, tokens are dealt alternately into A and B; each token of A is linked to its most similar token of B
(cosine of the keys' mean over heads); the r strongest links merge by a mean weighted by size, and the two sets are concatenated, A first.
Attention adds the logarithm of the sizes (the transformer does, see `mmsdk.vision.shorten`). The class token never merges, and a block
merges at most half of its patch tokens.

Ours is only the schedule: r is spread as evenly over the blocks as that half allows, so that the last block ends at exactly the budget.
Each picture, and each frame of a clip, is merged by itself.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import BudgetError
from mmsdk.vision.shorten import Inside

__all__ = ["ToMe"]

# Entries of a slice of the similarities that may exist at one time: 8 MiB in float32.
_SLICE = 2**21


@dataclass(frozen=True, slots=True)
class ToMe:
    """A `Shortener`; no knobs."""

    def plan(self, n: int, count: int, depth: int) -> tuple[int, ...]:
        """An even descent to `count`, raised towards the end where a block would have to merge more than half."""
        left = [count]
        for block in reversed(range(depth)):
            left.append(min(n - (n - count) * block // depth, 2 * left[-1]))
        if left[-1] < n:
            raise BudgetError(f"tome merges at most half of the tokens in each of {depth} blocks: {n} tokens cannot become {count}")
        return tuple(reversed(left[:-1]))

    def join(self, inside: Inside, count: int) -> Int[Tensor, "b s"]:
        """Bipartite soft matching over the keys; of equal links the earlier ones merge."""
        first, (batch, s) = inside.first, inside.size.shape
        similar = F.normalize(inside.key.float().mean(dim=1), dim=-1)
        # every second place of the stream, the class token's among them, is A; what must stay is no end of a link
        begin = first % 2
        a, b = similar[:, first + begin :: 2], similar[:, first + 1 - begin :: 2]
        best, link = _best(a, b)
        merges = s - first - count
        strongest = best.argsort(dim=1, descending=True, stable=True)[:, :merges]
        merged = torch.zeros_like(best, dtype=torch.bool).scatter_(1, strongest, True)
        stay = first + a.shape[1] - merges
        target = torch.arange(s, device=best.device).repeat(batch, 1)
        target[:, first + begin :: 2] = torch.where(merged, stay + link, first + (~merged).cumsum(dim=1) - 1)
        target[:, first + 1 - begin :: 2] = stay + torch.arange(b.shape[1], device=b.device)
        return target


def _best(a: Float[Tensor, "b p e"], b: Float[Tensor, "b q e"]) -> tuple[Float[Tensor, "b p"], Int[Tensor, "b p"]]:
    """For each token of A its highest cosine to a token of B, and which; in slices, so that no matrix of all pairs is made."""
    step = max(1, _SLICE // (len(b) * max(1, b.shape[1])))
    found = [torch.matmul(part, b.transpose(1, 2)).max(dim=2) for part in a.split(step, dim=1)]
    return torch.cat([best for best, _ in found], dim=1), torch.cat([link for _, link in found], dim=1)
