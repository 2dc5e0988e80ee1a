"""A mixture of experts in the place of a feed-forward half (DeepSeekMoE, arXiv 2401.06066; DeepSeek-V3, arXiv 2412.19437).

Every token goes through the shared expert and through a few of the routed ones, each a SwiGLU of its own:

    out = shared(x) + sum_i g_i expert_i(x)

The router scores all experts, `softmax` (V2) or `sigmoid` (V3) of a linear map in float32. It picks in two steps, where there are groups:
the best groups first, then the best experts within them, so that a token visits few machines. V3 adds a bias to the scores, for choosing
alone, by which training keeps the experts' loads even without a loss; a group is then worth the sum of its two best, else its best.

[published] all of it. Letters: n tokens, k experts of a token, e experts, f inner width, d width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.decoder.linear import product
from mmsdk.decoder.mlp import GatedMLP
from mmsdk.errors import ModelError

__all__ = ["Experts", "MixedMLP", "Mixture", "Router", "Scoring", "swiglu"]

Scoring = Literal["softmax", "sigmoid", "sqrt_softplus"]

_SCORES: Mapping[Scoring, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid, "sqrt_softplus": lambda x: F.softplus(x).sqrt()}
)
_MOST = 1 << 16


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer, arXiv 2002.05202)."""
    return F.silu(gate) * up


@dataclass(frozen=True, slots=True)
class Mixture:
    """Sizes and switches. Of `experts`, each `inner` wide, a token takes `chosen`; `shared` is the width of the one that all take.

    `groups` of neighbours, of which `chosen_groups` are open to a token; `balanced` adds V3's bias; `normalised` lets the chosen scores sum
    to one, and `scale` multiplies them. The layers in `plain` keep one feed-forward half. Raises ModelError for what does not fit together.
    """

    experts: int
    chosen: int
    inner: int
    shared: int
    scoring: Scoring
    groups: int = 1
    chosen_groups: int = 1
    balanced: bool = False
    normalised: bool = False
    scale: float = 1.0
    plain: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("experts", "chosen", "inner", "shared", "groups", "chosen_groups"):
            size = getattr(self, name)
            if not 1 <= size <= _MOST:
                raise ModelError(f"mixture of experts: {name} is {size}, it must be from 1 to {_MOST}")
        if self.experts % self.groups or self.chosen_groups > self.groups:
            raise ModelError(f"mixture of experts: {self.experts} experts do not give {self.chosen_groups} of {self.groups} even groups")
        members = self.experts // self.groups
        if self.balanced and self.groups > 1 and members < 2:
            raise ModelError("mixture of experts: a group is worth its two best, so that it needs two experts")
        if self.chosen > members * self.chosen_groups:
            raise ModelError(f"mixture of experts: {self.chosen} cannot be chosen among {members * self.chosen_groups}")


class Router(nn.Module):
    """Which experts each token goes through, and with what weight. Its parameters may be wider than the stream: choices are sharp."""

    def __init__(self, width: int, mixture: Mixture) -> None:
        super().__init__()
        self.mixture = mixture
        self.weight = nn.Parameter(torch.zeros(mixture.experts, width))
        self.bias = nn.Parameter(torch.zeros(mixture.experts)) if mixture.balanced else None

    def forward(self, x: Float[Tensor, "n d"]) -> tuple[Int[Tensor, "n k"], Float[Tensor, "n k"]]:
        """The experts of each token, in no order, and their weights in float32."""
        scores = _SCORES[self.mixture.scoring](F.linear(x.float(), self.weight.float()))
        choice = scores if self.bias is None else scores + self.bias.float()
        experts = self._within_groups(choice).topk(self.mixture.chosen, sorted=False).indices
        weights = scores.gather(1, experts)
        if self.mixture.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * self.mixture.scale

    def _within_groups(self, choice: Float[Tensor, "n e"]) -> Float[Tensor, "n e"]:
        """-inf outside the best groups."""
        if self.mixture.chosen_groups == self.mixture.groups:
            return choice
        groups = choice.unflatten(1, (self.mixture.groups, -1))
        worth = groups.topk(2).values.sum(-1) if self.mixture.balanced else groups.amax(-1)
        best = worth.topk(self.mixture.chosen_groups, sorted=False).indices
        closed = torch.ones_like(worth, dtype=torch.bool).scatter(1, best, False)
        within: Tensor = groups.masked_fill(closed[..., None], -torch.inf)
        return within.flatten(1)


class Experts(nn.Module):
    """The routed experts, their matrices below one another: gate and up [(e 2 f) d], gate first, and down [(e d) f].

    In fewer bits each expert has linear layers of its own in their place (`hold`), on the processor.
    """

    def __init__(self, width: int, mixture: Mixture, gating: Callable[[Tensor, Tensor], Tensor] = swiglu) -> None:
        super().__init__()
        self.count, self.gating = mixture.experts, gating
        self.gate_up: nn.Parameter | nn.ModuleList = nn.Parameter(torch.zeros(mixture.experts * 2 * mixture.inner, width))
        self.down: nn.Parameter | nn.ModuleList = nn.Parameter(torch.zeros(mixture.experts * width, mixture.inner))

    def hold(self, name: str, linears: Sequence[nn.Module]) -> None:
        """Linear layers, one an expert, in the place of "gate_up" or "down"."""
        assert len(linears) == self.count, "every expert has one"
        # a module does not take a parameter's place by itself
        delattr(self, name)
        self.add_module(name, nn.ModuleList(linears))

    def forward(self, x: Float[Tensor, "n d"], experts: Int[Tensor, "n k"], weights: Float[Tensor, "n k"]) -> Float[Tensor, "n d"]:
        """The weighted sum of what its experts make of each token, summed in float32."""
        # One look at the device tells how many tokens each expert has; a few tokens on a GPU do without it.
        few = x.device.type != "cpu" and experts.numel() <= self.count
        made = self._each(x, experts) if few else self._by_expert(x, experts)
        parts: Tensor = made.unflatten(0, experts.shape)
        return (parts.float() * weights[..., None]).sum(1).to(x.dtype)

    def _by_expert(self, x: Float[Tensor, "n d"], experts: Int[Tensor, "n k"]) -> Float[Tensor, "_ d"]:
        """Tokens in the order of their experts, so that each expert is a matrix product over all of its own."""
        flat = experts.flatten()
        order = flat.argsort()
        counts = flat.bincount(minlength=self.count).tolist()
        parts = x[order // experts.shape[1]].split(counts)
        made = [self._one(part, expert) for expert, part in enumerate(parts) if len(part)]
        return x.new_empty(len(flat), x.shape[1]).index_copy(0, order, torch.cat(made))

    def _one(self, x: Float[Tensor, "n d"], expert: int) -> Float[Tensor, "n d"]:
        hidden = self.gating(*self._product(x, self.gate_up, expert).chunk(2, dim=-1))
        return self._product(hidden, self.down, expert)

    def _product(self, x: Float[Tensor, "n i"], matrices: nn.Parameter | nn.ModuleList, expert: int) -> Float[Tensor, "n o"]:
        if isinstance(matrices, nn.ModuleList):
            out: Tensor = matrices[expert](x)
            return out
        return product(x, self._parted(matrices)[expert])

    def _each(self, x: Float[Tensor, "n d"], experts: Int[Tensor, "n k"]) -> Float[Tensor, "_ d"]:
        """Every token with copies of its own experts' matrices."""
        gate_up, down = (self._parted(matrices)[experts.flatten()] for matrices in (self.gate_up, self.down))
        tokens = x.repeat_interleave(experts.shape[1], dim=0)
        hidden = self.gating(*torch.bmm(gate_up, tokens[..., None]).squeeze(-1).chunk(2, dim=-1))
        return torch.bmm(down, hidden[..., None]).squeeze(-1)

    def _parted(self, matrices: nn.Parameter | nn.ModuleList) -> Float[Tensor, "e o i"]:
        assert isinstance(matrices, nn.Parameter), "those in fewer bits are each by itself"
        parted: Tensor = matrices.unflatten(0, (self.count, -1))
        return parted


class MixedMLP(nn.Module):
    """The feed-forward half: the shared expert and the routed ones."""

    def __init__(self, width: int, mixture: Mixture, bias: bool) -> None:
        super().__init__()
        self.router = Router(width, mixture)
        self.experts = Experts(width, mixture)
        self.shared = GatedMLP(width, mixture.shared, bias)

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """Width d in, width d out."""
        tokens = x.reshape(-1, x.shape[-1])
        routed: Tensor = self.experts(tokens, *self.router(tokens))
        out: Tensor = routed.view_as(x) + self.shared(x)
        return out
