"""Hybrid sparse attention: a linear part over all that ever was, and softmax over the blocks that matter, as many as each head needs.

WorldAttention (abstract): linear global attention and head-adaptive sparse attention together. The formulas are our reconstruction:
O = g L + (1 - g) S, with L = phi(Q) (sum phi(K)^T V) / (phi(Q) sum phi(K)), phi = elu + 1, and S over the fewest blocks of keys whose
pooled probability reaches the head's mass. g is a constant where nothing was trained.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mmsdk.diffusion.attention.attend import attend
from mmsdk.diffusion.attention.blocks import pooled, scores
from mmsdk.diffusion.attention.types import Blocks, Selection
from mmsdk.errors import InputError

__all__ = ["Hybrid", "Sums", "head_masses", "summed"]

_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Sums:
    """All that linear attention knows of its keys and values, however many: sum phi(K)^T V and sum phi(K), in float32."""

    products: Float[Tensor, "b h d d"]
    keys: Float[Tensor, "b h d"]

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.products + other.products, self.keys + other.keys)

    def read(self, query: Float[Tensor, "b h s d"]) -> Float[Tensor, "b h s d"]:
        """Linear attention, in float32."""
        asked = _phi(query)
        return (asked @ self.products) / ((asked @ self.keys[..., None]) + _EPS)


def summed(keys: Float[Tensor, "b h t d"], values: Float[Tensor, "b h t d"]) -> Sums:
    """Of some keys and values."""
    features = _phi(keys)
    return Sums(features.transpose(2, 3) @ values.float(), features.sum(2))


@dataclass(frozen=True, slots=True)
class Hybrid:
    """`share` is g; `masses` one for all heads, or one for each; a block of queries reads at least `least` blocks, and at most `most`."""

    share: float = 0.1
    masses: tuple[float, ...] = (0.9,)
    block: int = 64
    least: int = 1
    most: int = 2**31

    def __post_init__(self) -> None:
        within = all(0 < mass <= 1 for mass in self.masses)
        if not (0 <= self.share <= 1 and self.masses and within and self.block >= 1 and 1 <= self.least <= self.most):
            raise InputError(f"{self}: shares lie in [0, 1], masses in (0, 1], and 1 <= least <= most", item="hybrid")

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b h t d"], values: Float[Tensor, "b h t d"], everything: Sums
    ) -> Float[Tensor, "b h s d"]:
        """Attention of queries to the keys that are at hand, and to the sums of all there were, those among them."""
        if self.share == 1:
            return everything.read(query).to(query.dtype)
        near = attend(query, keys, values, self._chosen(query, keys))
        if self.share == 0:
            return near
        return (self.share * everything.read(query) + (1 - self.share) * near.float()).to(query.dtype)

    def _chosen(self, query: Tensor, keys: Tensor) -> Selection:
        rows, columns = Blocks(self.block, query.shape[2]), Blocks(self.block, keys.shape[2])
        shares = _block_shares(query, keys, rows, columns)
        if len(self.masses) not in (1, query.shape[1]):
            raise InputError(f"{len(self.masses)} masses for {query.shape[1]} heads", item="hybrid")
        mass = torch.tensor(self.masses, device=query.device)[:, None, None]
        ranked, order = shares.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(columns.count, device=query.device)
        kept = ((ranked.cumsum(-1) - ranked < mass) | (mass >= 1) | (rank < self.least)) & (rank < self.most)
        return Selection(torch.zeros_like(kept).scatter_(-1, order, kept), rows, columns)


def head_masses(
    query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b h t d"], block: int = 64, low: float = 0.8, high: float = 0.98
) -> tuple[float, ...]:
    """The mass of each head from how evenly it attends: `low` where one block has it all, `high` where all have the same."""
    shares = _block_shares(query, keys, Blocks(block, query.shape[2]), Blocks(block, keys.shape[2]))
    entropy = -(shares * shares.clamp_min(1e-12).log()).sum(-1).mean((0, 2))
    evenness = entropy / torch.tensor(float(max(2, shares.shape[-1]))).log()
    found: list[float] = (low + (high - low) * evenness.clamp(0, 1)).tolist()
    return tuple(found)


def _block_shares(query: Tensor, keys: Tensor, rows: Blocks, columns: Blocks) -> Float[Tensor, "b h rows columns"]:
    """The probability that a block of keys has for a block of queries, by their means; larger blocks weigh more."""
    weights = scores(pooled(query, rows), pooled(keys, columns)) + columns.sizes(query.device).float().log()[:, :, None]
    return weights.softmax(-1)


def _phi(x: Tensor) -> Tensor:
    return F.elu(x.float()) + 1
