"""Blocks of vision transformers in C++ (`mmsdk.kernels.cpu.block`), where this machine and the block allow it.

torch's bfloat16 product brings every weight into another layout first, at every call, which for a picture of some hundred patches costs
as much as the product. Here weights are read as they lie, and norms, activations and residual connections happen on the way.

Everything else goes the block's own way: other dtypes, gradients, adapters, gated MLPs. Both ways agree to within rounding; this one
rounds less often.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.kernels.cpu import block, prompt
from mmsdk.kernels.cpu.matrix import wide

__all__ = ["Native", "everywhere"]


@dataclass(frozen=True, slots=True)
class Native:
    """A block as the library takes it. It points to where the modules' numbers are now, and is not to be kept.

    Hooks of modules within the block are not called.
    """

    block: block.Block

    @staticmethod
    def of(
        x: Float[Tensor, "*b d"], linears: Sequence[nn.Module], norms: Sequence[nn.Module], scales: Sequence[Tensor], activation: str
    ) -> "Native | None":
        """Of the block in front of x, where the library takes both.

        `linears` are qkv, o, up and down; a norm stands in front of either half; `scales`, if any, are those of both updates by channel.
        """
        if x.dtype != torch.bfloat16 or x.device.type != "cpu" or torch.is_grad_enabled() or not x.numel() or not prompt.ready():
            return None
        maps, plain = [one for one in linears if type(one) is nn.Linear], [one for one in norms if type(one) is nn.LayerNorm]
        if len(maps) < len(linears) or len(plain) < len(norms) or len({one.eps for one in plain}) > 1:
            return None
        if not block.fits(x.shape[-1], maps[3].in_features, activation):
            return None
        vectors = [part for one in plain for part in (one.weight, one.bias)] + list(scales)
        numbers = [*vectors, *(part for one in maps for part in (one.weight, one.bias))]
        if any(part is None or part.dtype != torch.bfloat16 or part.device.type != "cpu" or not part.is_contiguous() for part in numbers):
            return None
        qkv, o, up, down = (wide(one.weight.detach(), one.bias.detach()) for one in maps)
        return Native(block.Block.of((qkv, o, up, down), [part.detach() for part in vectors], plain[0].eps, activation))

    def project(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b n"]:
        """Queries, keys and values of the normalised stream, side by side."""
        return block.project(self.block, _rows(x)).view(*x.shape[:-1], -1)

    def add(self, x: Float[Tensor, "*b d"], seen: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """The stream after attention, of what the heads saw, side by side."""
        return block.add(self.block, _rows(x), _rows(seen)).view(x.shape)

    def feed(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """The stream after the MLP."""
        return block.feed(self.block, _rows(x)).view(x.shape)


def everywhere(
    query: Float[Tensor, "b h n e"],
    key: Float[Tensor, "b h n e"],
    value: Float[Tensor, "b h n e"],
    bias: Float[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b h n e"]:
    """Attention of everything to everything; `bias` is added to the scores of each key."""
    biases = () if bias is None else (bias.to(query.dtype)[:, None, None].expand(-1, 1, query.shape[2], -1),)
    if prompt.attends(query, key, value):
        return prompt.attend(query, key, value, key.shape[2], biases)
    return F.scaled_dot_product_attention(query, key, value, *biases)


def _rows(x: Float[Tensor, "*b d"]) -> Float[Tensor, "m d"]:
    return x.reshape(-1, x.shape[-1]).contiguous()
