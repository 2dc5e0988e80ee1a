"""Manifold-constrained hyper-connections (mHC): several residual streams in the place of one (Xie et al., arXiv 2512.24880; DeepSeek-V4).

A half of a layer reads a weighted sum of n streams and writes its output back to all of them, while the streams are mixed:

    x = sum_i pre_i stream_i,      stream_k <- post_k half(x) + sum_j mix_jk stream_j

The weights depend on the token: a linear map of all its streams, normalised together. `pre` is in (0, 1), `post` in (0, 2), and `mix` is
near a doubly stochastic matrix (Sinkhorn-Knopp: columns and rows are divided by their sums by turns), so that deep stacks neither blow up
nor fade. All of it published, as in transformers' deepseek_v4; float32 throughout.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["HyperConnection", "HyperHead", "Mixing", "spread"]


@dataclass(frozen=True, slots=True)
class Mixing:
    """What becomes of the streams behind a half of a layer."""

    post: Float[Tensor, "b s n"]
    mix: Float[Tensor, "b s n n"]

    def __call__(self, streams: Float[Tensor, "b s n d"], out: Float[Tensor, "b s d"]) -> Float[Tensor, "b s n d"]:
        """The half's output on every stream, and the streams before it, mixed."""
        post, mix = self.post.to(out.dtype), self.mix.to(out.dtype)
        return post[..., None] * out[:, :, None] + mix.transpose(2, 3) @ streams


class HyperConnection(nn.Module):
    """In front of a half of a layer: what it reads, and how its output joins the streams."""

    def __init__(self, width: int, streams: int, rounds: int, eps: float, norm_eps: float) -> None:
        super().__init__()
        self.sizes = streams, streams, streams * streams
        self.weight = nn.Parameter(torch.zeros(sum(self.sizes), streams * width))
        self.base = nn.Parameter(torch.zeros(sum(self.sizes)))
        self.scale = nn.Parameter(torch.zeros(3))
        self.rounds, self.eps, self.norm_eps = rounds, eps, norm_eps

    def forward(self, streams: Float[Tensor, "b s n d"]) -> tuple[Float[Tensor, "b s d"], Mixing]:
        """The half's input, and the mixing that takes its output."""
        n = streams.shape[2]
        maps = F.linear(_normed(streams, self.norm_eps), self.weight.float()).split(self.sizes, dim=-1)
        bases = self.base.float().split(self.sizes)
        pre, post, mix = (part * scale + base for part, scale, base in zip(maps, self.scale.float(), bases, strict=True))
        weights = pre.sigmoid() + self.eps
        mixing = Mixing(2 * post.sigmoid(), self._balanced(mix.unflatten(-1, (n, n)).softmax(-1) + self.eps))
        return _weighed(streams, weights), mixing

    def _balanced(self, mix: Float[Tensor, "b s n n"]) -> Float[Tensor, "b s n n"]:
        """Sinkhorn-Knopp: columns first, and columns last."""
        mix = mix / (mix.sum(2, keepdim=True) + self.eps)
        for _ in range(self.rounds - 1):
            mix = mix / (mix.sum(3, keepdim=True) + self.eps)
            mix = mix / (mix.sum(2, keepdim=True) + self.eps)
        return mix


class HyperHead(nn.Module):
    """Behind the last layer: one stream out of all."""

    def __init__(self, width: int, streams: int, eps: float, norm_eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(streams, streams * width))
        self.base = nn.Parameter(torch.zeros(streams))
        self.scale = nn.Parameter(torch.zeros(1))
        self.eps, self.norm_eps = eps, norm_eps

    def forward(self, streams: Float[Tensor, "b s n d"]) -> Float[Tensor, "b s d"]:
        """The weighted sum of the streams."""
        maps = F.linear(_normed(streams, self.norm_eps), self.weight.float())
        return _weighed(streams, (maps * self.scale.float() + self.base.float()).sigmoid() + self.eps)


def spread(x: Float[Tensor, "b s d"], streams: int) -> Float[Tensor, "b s n d"]:
    """The same on every stream, in front of the first layer."""
    return x[:, :, None].expand(-1, -1, streams, -1)


def _normed(streams: Float[Tensor, "b s n d"], eps: float) -> Float[Tensor, "b s nd"]:
    wide = streams.flatten(2).float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def _weighed(streams: Float[Tensor, "b s n d"], weights: Float[Tensor, "b s n"]) -> Float[Tensor, "b s d"]:
    return (weights[..., None] * streams).sum(2).to(streams.dtype)
