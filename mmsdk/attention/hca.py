"""Heavily compressed attention: every m' tokens become one entry (DeepSeek-V4, section 2.3.2; transformers' deepseek_v4).

    C = H W_kv,  Z = H W_z + B,    entry_w = sum_j softmax_j(Z)_j * C_j    over the tokens j of window w, each channel for itself

The caller projects, and normalises and rotates what comes out (RMSNorm, RoPE at position w m'). An entry is seen once its window is
complete: by position p where w < (p + 1) // m'. All of it published; m' is 128 there, so that a million tokens are 7,812 entries.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.attention.levels import over_heads

__all__ = ["Far", "complete", "pooled"]


def pooled(content: Float[Tensor, "b w m d"], gates: Float[Tensor, "b w m d"]) -> Float[Tensor, "b w d"]:
    """One entry a window: the m tokens of each weighed by a softmax over them, channel by channel, in float32.

    A gate of -inf leaves a token out; each window must have one that is not.
    """
    return (content.float() * gates.float().softmax(dim=2)).sum(dim=2)


def complete(positions: Int[Tensor, "b s"], rate: int) -> Int[Tensor, "b s"]:
    """How many windows of `rate` tokens are behind each position, its own token counted in; none for padding (-1)."""
    return (positions + 1) // rate


@dataclass(frozen=True, slots=True)
class Far:
    """Compressed entries, of which each query sees the first `seen`. All queries see the first `settled`, which the host knows."""

    memory: Float[Tensor, "b t d"]
    seen: Int[Tensor, "b s"]
    settled: int = 0

    @property
    def entries(self) -> int:
        """Compressed entries, seen or not."""
        return self.memory.shape[1]

    def numbers(self, heads: int) -> int:
        """A row of scores."""
        return heads * self.memory.shape[1]

    def scores(self, query: Float[Tensor, "b h s d"]) -> Float[Tensor, "b h s t"]:
        """See `Level`."""
        scores = over_heads(query, self.memory)
        late = torch.arange(self.settled, self.memory.shape[1], device=scores.device) >= self.seen[:, :, None]
        scores[..., self.settled :].masked_fill_(late[:, None], -torch.inf)
        return scores

    def mix(self, weights: Float[Tensor, "b h s t"]) -> Float[Tensor, "b h s d"]:
        """See `Level`."""
        b, h, s, t = weights.shape
        return torch.bmm(weights.reshape(b, h * s, t), self.memory).view(b, h, s, -1)

    def part(self, start: int, stop: int) -> "Far":
        """These queries over the same entries."""
        return replace(self, seen=self.seen[:, start:stop])
