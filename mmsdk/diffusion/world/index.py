"""What each page is about: the mean of its keys, and their largest and smallest value in every channel; always beside the model.

A reconstruction of WorldAttention's semantic index (abstract): the mean, and the bounds of Quest (arXiv 2406.10774), which no key's score
is above. It grows by three tokens a page and head.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Index", "Kind"]

Kind = Literal["mean", "bounds"]
_DECAY = 0.9


class Index:
    """Of the pages of one layer, by number."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        # Means, largest and smallest of each page, with room for pages to come; nothing before the first.
        self._entries = torch.empty(3, 0, 0, 0, 0)
        self._averages: list[float] = []

    def __len__(self) -> int:
        return len(self._averages)

    def add(self, keys: Float[Tensor, "b h p d"]) -> None:
        """A page."""
        wide = keys.float()
        count, (b, h, d) = len(self), (*keys.shape[:2], keys.shape[3])
        if count == self._entries.shape[3]:
            grown = wide.new_empty(3, b, h, max(16, 2 * count), d)
            grown[:, :, :, :count] = self._entries if count else 0
            self._entries = grown
        self._entries[:, :, :, count] = torch.stack((wide.mean(2), wide.amax(2), wide.amin(2)))
        self._averages.append(0.0)

    def best(self, query: Float[Tensor, "b h s d"], low: int, high: int, count: int, block: int) -> list[int]:
        """The `count` pages from `low` up to `high` that weigh most for any block of queries of any head, in the order of time.

        Weights of a block sum to 1 over the pages. Their moving averages are noted for `likely`. Waits for the device.
        """
        if high <= low or count < 1:
            return []
        weights = self._weights(query, low, high, block)
        for page, weight in enumerate(weights.tolist(), low):
            self._averages[page] = _DECAY * self._averages[page] + (1 - _DECAY) * weight
        order = weights.argsort(descending=True, stable=True)[:count]
        return sorted(low + int(page) for page in order.tolist())

    def likely(self) -> list[int]:
        """All pages, those first that have weighed most lately."""
        return sorted(range(len(self)), key=lambda page: (-self._averages[page], page))

    def _weights(self, query: Tensor, low: int, high: int, block: int) -> Float[Tensor, " pages"]:
        s = query.shape[2]
        sums = F.pad(query.float(), (0, 0, 0, -s % block)).unflatten(2, (-1, block)).sum(3)
        sizes = torch.full((sums.shape[2], 1), float(block), device=query.device)
        sizes[-1] = s - block * (len(sizes) - 1)
        mean = (sums / sizes)[:, :, :, None]
        means, largest, smallest = self._entries[:, :, :, low:high].unbind(0)
        if self._kind == "mean":
            found = (mean * means[:, :, None]).sum(-1)
        else:
            found = torch.maximum(mean * largest[:, :, None], mean * smallest[:, :, None]).sum(-1)
        weights: Tensor = (found / query.shape[3] ** 0.5).softmax(-1).amax((0, 1, 2))
        return weights
