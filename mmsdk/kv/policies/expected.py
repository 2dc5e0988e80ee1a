"""What future queries are expected to look at stays (Expected Attention, Devoto et al., arXiv 2510.00636).

    q ~ N(m, C) before RoPE, over the prompt;  m', C' : the same turned by the mean rotation over the next `future` positions
    worth(k, v) = softmax_k(m' k / sqrt(d) + k C' k / (2 d)) |v|           the log of E[exp(q k / sqrt(d))] for a normal q

[published] all of it, with the first `sinks` tokens left out of the statistics and of the softmax, and always kept; a mean over the heads
that share a key-value head; defaults are kvpress's. [ours] the newest token stays; mean and covariance are sums in float32 that each pass
adds to, so that with an `interval` the answer's own queries count as well.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import BudgetError
from mmsdk.kv.entries import Entries
from mmsdk.kv.policy import Ask

__all__ = ["Expected"]


@dataclass(frozen=True, slots=True)
class Expected:
    """Every key-value head keeps its own tokens. `covariance` and `norms` switch the second term and |v|."""

    future: int = 512
    sinks: int = 4
    covariance: bool = True
    norms: bool = True
    interval: int = 0
    dense: int = 0

    def __post_init__(self) -> None:
        if self.future < 1 or self.sinks < 0:
            raise BudgetError(
                f"expected looks at one future position or more, and keeps sinks from 0 on, got {self.future} and {self.sinks}"
            )

    def observe(self, entries: Entries, query: Float[Tensor, "b h s d"], ask: Ask) -> None:
        """Add to the sums of queries before RoPE, of their products, and to their number; note what position comes next."""
        counts = ask.positions >= self.sinks
        before = ask.unturned(query).masked_fill(~counts[:, None, :, None], 0)
        sums = {"queries": counts.sum(1), "sum": before.sum(2)}
        if self.covariance:
            sums["products"] = before.transpose(2, 3) @ before
        for name, new in sums.items():
            entries.notes[name] = entries.notes.get(name, torch.zeros_like(new)) + new
        entries.notes["next"] = ask.places.amax(1) + 1

    def scores(self, entries: Entries, keep: Int[Tensor, " b"]) -> Float[Tensor, "b g t"]:
        """The worth; sinks and the newest token before all."""
        order, keys = entries.order, entries.keys.float()
        apart = order < self.sinks  # sinks and padding
        logits = self._logits(entries, keys).masked_fill(apart.unsqueeze(2), -torch.inf)
        # rows of sinks alone have no softmax
        worth = logits.softmax(-1).masked_fill(apart.unsqueeze(2), 0).mean(2)
        if self.norms:
            worth = worth * entries.values.float().norm(dim=-1)
        found: Tensor = worth.masked_fill(apart | (order == entries.lengths[..., None] - 1), torch.inf)
        return found

    def _logits(self, entries: Entries, keys: Float[Tensor, "b g t d"]) -> Float[Tensor, "b g r t"]:
        """Expected logits of the r heads of every group."""
        notes, d = entries.notes, keys.shape[-1]
        number = notes["queries"].clamp_min(1)[:, None, None]
        mean = notes["sum"] / number
        cos, sin = (x[:, None] for x in entries.turning.mean(notes["next"], self.future))
        b, g = keys.shape[:2]
        logits = _turned(mean, cos, sin).reshape(b, g, -1, d) @ keys.transpose(2, 3) / math.sqrt(d)
        if not self.covariance:
            return logits
        spread = notes["products"] / number[..., None] - mean[..., None] * mean[..., None, :]
        # turned on both sides: R C R^T
        half = _turned(spread, cos[:, :, None], sin[:, :, None]).transpose(2, 3)
        turned = _turned(half, cos[:, :, None], sin[:, :, None]).reshape(b, g, -1, d, d)
        # one head of every group at a time: together they would hold as many numbers as all queries of the prompt
        return logits + torch.stack([(keys @ one * keys).sum(-1) for one in turned.unbind(2)], dim=2) / (2 * d)


def _turned(x: Float[Tensor, "*n d"], cos: Float[Tensor, "*m f"], sin: Float[Tensor, "*m f"]) -> Float[Tensor, "*n d"]:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
