"""DeepSeek-V4's mixture of experts: V3's, with clamped experts, and in the first layers a table in the place of the choice.

A hash layer looks its experts up by the token's id (Hash Layers, arXiv 2106.04426), in a table that is fixed before training; the router's
scores only weigh them. Experts clamp what they multiply: silu(min(gate, c)) * max(min(up, c), -c). All of it published, as in
transformers' deepseek_v4.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.decoder.linear import Linear
from mmsdk.decoder.moe import Experts, Mixture, Router

__all__ = ["Clamped", "HashRouter", "HashedMLP", "RoutedMLP"]


@dataclass(frozen=True, slots=True)
class Clamped:
    """SwiGLU over clamped inputs."""

    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        return F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


class ClampedMLP(nn.Module):
    """The shared expert; gate and up are one matrix [2 * inner, d], gate first."""

    def __init__(self, width: int, inner: int, gating: Clamped) -> None:
        super().__init__()
        self.gate_up = Linear(width, 2 * inner, bias=False)
        self.down = Linear(inner, width, bias=False)
        self.gating = gating

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """Width d in, width d out."""
        down: Tensor = self.down(self.gating(*self.gate_up(x).chunk(2, dim=-1)))
        return down


class HashRouter(nn.Module):
    """Experts by a token's id, weighed by sqrt(softplus) scores that sum to the mixture's scale."""

    def __init__(self, width: int, vocabulary: int, mixture: Mixture) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(mixture.experts, width))
        self.table = nn.Buffer(torch.zeros(vocabulary, mixture.chosen, dtype=torch.long))
        self.scale = mixture.scale

    def forward(self, x: Float[Tensor, "n d"], ids: Int[Tensor, " n"]) -> tuple[Int[Tensor, "n k"], Float[Tensor, "n k"]]:
        """The experts of each token, and their weights in float32."""
        experts = self.table[ids]
        weights = F.softplus(F.linear(x.float(), self.weight.float())).sqrt().gather(1, experts)
        return experts, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scale


class RoutedMLP(nn.Module):
    """The feed-forward half of most layers: experts by their scores, and the shared one."""

    def __init__(self, width: int, mixture: Mixture, limit: float) -> None:
        super().__init__()
        gating = Clamped(limit)
        self.router = Router(width, mixture)
        self.experts = Experts(width, mixture, gating)
        self.shared = ClampedMLP(width, mixture.shared, gating)

    def forward(self, x: Float[Tensor, "b s d"], ids: Int[Tensor, "b s"]) -> Float[Tensor, "b s d"]:
        """Width d in, width d out; ids are not looked at."""
        tokens = x.flatten(0, 1)
        out: Tensor = self.experts(tokens, *self.router(tokens)).view_as(x) + self.shared(x)
        return out


class HashedMLP(nn.Module):
    """The feed-forward half of a hash layer: experts by the tokens' ids, and the shared one."""

    def __init__(self, width: int, vocabulary: int, mixture: Mixture, limit: float) -> None:
        super().__init__()
        gating = Clamped(limit)
        self.router = HashRouter(width, vocabulary, mixture)
        self.experts = Experts(width, mixture, gating)
        self.shared = ClampedMLP(width, mixture.shared, gating)

    def forward(self, x: Float[Tensor, "b s d"], ids: Int[Tensor, "b s"]) -> Float[Tensor, "b s d"]:
        """Width d in, width d out."""
        tokens = x.flatten(0, 1)
        out: Tensor = self.experts(tokens, *self.router(tokens, ids.flatten())).view_as(x) + self.shared(x)
        return out
