"""Online attention scores: what each consumer of the memory has been looking at, smoothed over its reads.

Published (D2-VLA, arXiv 2609.34792, there called Online-H2O): h+ = rho h + (1 - rho) abar for the tokens that were observed this time,
rho = .2; the others keep what they have and new ones begin at 0; abar is the mean over heads, valid queries and flow steps; a token's
score u is the largest h over the layers, taken before the read.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.attention.mask import Bias
from mmsdk.kv.types import LayerView

__all__ = ["Tally", "shares", "smoothed"]


def smoothed(
    scores: Float[Tensor, "l b s"],
    index: Int[Tensor, "b k"],
    valid: Bool[Tensor, "b k"],
    received: Float[Tensor, "l b k"],
    keep: float,
) -> Float[Tensor, "l b s"]:
    """The scores after a read of these slots, `keep` being rho; slots that were not read, or hold nothing, stay as they are."""
    places = index.expand(len(scores), -1, -1)
    before = scores.gather(2, places)
    after = torch.where(valid, keep * before + (1 - keep) * received.to(scores.dtype), before)
    return scores.scatter(2, places, after)


def shares(query: Float[Tensor, "b h s d"], view: LayerView, key: Float[Tensor, "b g s d"], mask: Bias) -> Float[Tensor, "b t"]:
    """The weight that each entry of the prefix gets from a suffix that also sees itself: mean over heads and queries, in float32."""
    b, h, s, d = query.shape
    keys = torch.cat((view.keys.to(key.dtype), key), dim=2).float()
    g, t = keys.shape[1:3]
    # the queries that share a key-value head stand below one another, so that keys are not expanded
    scores = (query.float().reshape(b, g, -1, d) * d**-0.5 @ keys.transpose(2, 3)).view(b, h, s, t)
    weights: Tensor = (scores + mask.bias.float()).softmax(dim=-1)
    return weights.mean(dim=(1, 2))[:, : view.keys.shape[2]]


class Tally:
    """Looks on while an expert attends (see `mmsdk.vla.heads.expert.Watch`), and tells what each entry of the prefix got on average."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._calls: dict[int, int] = {}

    @torch.no_grad()
    def __call__(self, layer: int, query: Float[Tensor, "b h s d"], view: LayerView, key: Float[Tensor, "b g s d"], mask: Bias) -> None:
        """Count one layer of one flow step."""
        share = shares(query, view, key, mask)
        self._sums[layer] = self._sums[layer] + share if layer in self._sums else share
        self._calls[layer] = self._calls.get(layer, 0) + 1

    def mean(self) -> Float[Tensor, "l b t"]:
        """abar of every layer, over the flow steps so far. There must have been one."""
        return torch.stack([self._sums[layer] / self._calls[layer] for layer in sorted(self._sums)])
