"""Grouped-query attention to the last tokens of rows in order and without padding, with its log-sum-exp."""

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["banded"]

_QUERIES = 256


def banded(
    query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b g t d"], values: Float[Tensor, "b g t d"], window: int
) -> tuple[Float[Tensor, "b h s d"], Float[Tensor, "b h s"]]:
    """Query i, in column t - s + i, over its own column and the window - 1 before it; the log-sum-exp of its scores, in float32.

    Queries are taken in slices, each of which reads the columns of its own windows alone.
    """
    first, outs, sums = keys.shape[2] - query.shape[2], [], []
    for start in range(0, query.shape[2], _QUERIES):
        part = query[:, :, start : start + _QUERIES]
        low, high = max(0, first + start - window + 1), first + start + part.shape[2]
        out, lse = _slice(part, keys[:, :, low:high], values[:, :, low:high], window)
        outs.append(out)
        sums.append(lse)
    return torch.cat(outs, dim=2), torch.cat(sums, dim=2)


def _slice(
    query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b g t d"], values: Float[Tensor, "b g t d"], window: int
) -> tuple[Float[Tensor, "b h s d"], Float[Tensor, "b h s"]]:
    b, h, s, d = query.shape
    g, t = keys.shape[1:3]
    scores = (query.reshape(b, g, h // g * s, d) * d**-0.5 @ keys.transpose(2, 3)).view(b, h, s, t).float()
    behind = torch.arange(t - s, t, device=query.device)[:, None] - torch.arange(t, device=query.device)
    scores = scores.masked_fill((behind < 0) | (behind >= window), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().to(values.dtype)
    return (weights.view(b, g, -1, t) @ values).view_as(query), lse
