"""XAttention: sums along antidiagonals tell how much a block of the attention matrix weighs.

Source: XAttention: Block Sparse Attention with Antidiagonal Scoring, arXiv 2503.16428. Published: of every stride of S tokens the keys are
laid side by side as one vector of S d numbers, the queries in reverse order, so that one product is the sum of an antidiagonal of S by S
scores; softmax of that / (sqrt(d) S), summed within blocks of 128; of each row of blocks the smallest set with at least 0.9 of the sum.
S is 8 or 16; 16,384 queries at a time. The causal form, which also keeps the sink and the diagonal, is not here: a video looks both ways.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mmsdk.diffusion.attention.blocks import heads_of, kept_mass, touching
from mmsdk.diffusion.attention.types import Blocks, Choice, Place, Selection
from mmsdk.errors import InputError

__all__ = ["Xattention"]


@dataclass(frozen=True, slots=True)
class Xattention:
    """The stride S, which divides the block of 128, the share of the sum that is kept, and the queries scored at one time."""

    stride: int = 8
    threshold: float = 0.9
    chunk: int = 16384

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"], place: Place
    ) -> Choice:
        if 128 % self.stride or self.chunk % 128:
            raise InputError(f"a stride of {self.stride} in blocks of 128, {self.chunk} at a time; both must divide", item="xattention")
        blocks = Blocks(128, query.shape[2])
        weights = self._weights(query, heads_of(keys, query.shape[1]))
        kept = kept_mass(weights / weights.sum(-1, keepdim=True), self.threshold)
        text = touching(place.grid.text(query.device), blocks)
        return Selection(kept | text[..., :, None] | text[..., None, :], blocks, blocks)

    def _weights(self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b h s d"]) -> Float[Tensor, "b h blocks blocks"]:
        s, d = query.shape[2:]
        padded = F.pad(keys.float(), (0, 0, 0, -s % 128))
        wide = padded.unflatten(2, (-1, self.stride)).flatten(3).transpose(2, 3)
        # strides of padding alone weigh nothing, as keys or as queries
        alive = torch.arange(wide.shape[3], device=query.device) * self.stride < s
        sums = []
        for part, real in zip(query.split(self.chunk, 2), alive.split(self.chunk // self.stride), strict=True):
            full = F.pad(part.float(), (0, 0, 0, -part.shape[2] % 128))
            turned = full.unflatten(2, (-1, self.stride)).flip(3).flatten(3)
            shares = (turned @ wide / (d**0.5 * self.stride)).masked_fill(~alive, -torch.inf).softmax(-1)
            shares = shares.masked_fill(~real[:, None], 0)
            per = 128 // self.stride
            sums.append(shares.unflatten(3, (-1, per)).sum(4).unflatten(2, (-1, per)).sum(3))
        return torch.cat(sums, 2)
