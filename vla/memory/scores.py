"""What an expert has been looking at while it solved a flow: the scores of the two readers that denoise (`mmsdk.kv.readers`) learn from it.

Published (D2-VLA, arXiv 2609.34792): abar is the mean over heads, valid queries and flow steps.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.attention.mask import Bias
from mmsdk.kv.received import received_behind
from mmsdk.kv.types import LayerView

__all__ = ["Tally"]


class Tally:
    """Looks on while an expert attends (see `mmsdk.vla.heads.expert.Watch`), and tells what each entry of the prefix got on average."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._calls: dict[int, int] = {}

    @torch.no_grad()
    def __call__(self, layer: int, query: Float[Tensor, "b h s d"], view: LayerView, key: Float[Tensor, "b g s d"], mask: Bias) -> None:
        """Count one layer of one flow step."""
        share = received_behind(query, view, key, mask.bias)
        self._sums[layer] = self._sums[layer] + share if layer in self._sums else share
        self._calls[layer] = self._calls.get(layer, 0) + 1

    def mean(self) -> Float[Tensor, "l b t"]:
        """abar of every layer, over the flow steps so far. There must have been one."""
        return torch.stack([self._sums[layer] / self._calls[layer] for layer in sorted(self._sums)])
