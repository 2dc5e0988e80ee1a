"""Who sees whom among prefix, state and actions: openpi's block rule [published].

Every token says by `starts` whether it begins a block. Tokens see their own block and all earlier ones: inside a block both ways, between
blocks only backwards. A prefix that is one block is bidirectional; actions that each begin a block are causal.
"""

import torch
from jaxtyping import Bool
from torch import Tensor

from mmsdk.attention.mask import Bias
from mmsdk.kv.types import LayerView

__all__ = ["SuffixMasks", "visible"]


def visible(valid: Bool[Tensor, "b s"], starts: Bool[Tensor, " s"]) -> Bool[Tensor, "b s s"]:
    """A[q, k] = valid_q and valid_k and cumsum(starts)_k <= cumsum(starts)_q."""
    block = starts.cumsum(0)
    return (block[None, :] <= block[:, None]) & valid[:, :, None] & valid[:, None, :]


class SuffixMasks:
    """The masks of a suffix over [a layer's prefix ; itself]: all of the prefix that is valid, and the block rule within.

    Layers that hold the same entries share one mask.
    """

    def __init__(self, starts: Bool[Tensor, " s"], dtype: torch.dtype) -> None:
        self._within = visible(torch.ones_like(starts)[None], starts)
        self._dtype = dtype
        self._valid: Tensor | None = None
        self._mask: Bias | None = None

    def of(self, view: LayerView) -> Bias:
        """The mask [b 1 s t+s] of a layer's view of the prefix."""
        if self._mask is None or view.valid is not self._valid:
            rows, size = view.valid.shape[0], self._within.shape[1]
            before = view.valid[:, None, :].expand(-1, size, -1)
            seen = torch.cat((before, self._within.expand(rows, -1, -1)), dim=2)
            self._valid, self._mask = view.valid, Bias.of(seen[:, None], self._dtype)
        return self._mask
