"""NSA as a layer's attention: queries, keys and values of three branches, the learned compression, the gates.

See `mmsdk.attention.nsa` for the branches. [published] each branch has keys and values of its own, so that none learns the shortcuts of
another; a learned map with a position of each token in its block compresses; gates are a sigmoid of a small network of the token.
[reconstruction] the widths of these networks, and that keys are rotated before they are compressed.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.attention.banded import banded
from mmsdk.attention.nsa import Sparsity, blocks_of, choose, coarse, fine, importance
from mmsdk.decoder.linear import Linear
from mmsdk.decoder.rope import Rotation
from mmsdk.errors import InputError
from mmsdk.kv.types import KVCache, LayerView

__all__ = ["BlockMap", "NativeSparseAttention"]


class BlockMap(nn.Module):
    """A block of m tokens to one: positions within the block are added, and the whole goes through two matrices."""

    def __init__(self, size: int, head_dim: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(size, head_dim))
        self.up = Linear(size * head_dim, 2 * head_dim, bias=False)
        self.down = Linear(2 * head_dim, head_dim, bias=False)

    def forward(self, blocks: Float[Tensor, "b g c m d"]) -> Float[Tensor, "b g c d"]:
        """One vector a block."""
        out: Tensor = self.down(F.silu(self.up((blocks + self.places).flatten(3))))
        return out


class NativeSparseAttention(nn.Module):
    """Needs a cache of 3 `kv_heads` heads: those of the compressed branch, the chosen blocks and the window, in this order.

    What is compressed is made anew from the cached keys in every pass.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, sizes: Sparsity) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.sizes = heads, kv_heads, head_dim, sizes
        self.q = Linear(width, heads * head_dim, bias=False)
        self.kv = Linear(width, 6 * kv_heads * head_dim, bias=False)
        self.gates = nn.Sequential(Linear(width, width, bias=False), nn.SiLU(), Linear(width, 3 * heads, bias=False))
        self.key_map, self.value_map = BlockMap(sizes.block, head_dim), BlockMap(sizes.block, head_dim)
        self.o = Linear(heads * head_dim, width, bias=False)

    def forward(self, x: Float[Tensor, "b s d"], rotation: Rotation, cache: KVCache, layer: int) -> Float[Tensor, "b s d"]:
        """Attend from the new tokens to all that the cache then holds; the caller has announced them by `cache.advance`.

        Raises InputError for rows with padding, or of several lengths.
        """
        query, keys, values = self.project(x, rotation)
        view = cache.append(layer, keys, values)
        if not isinstance(view, LayerView) or not view.ordered:
            raise InputError("NSA counts blocks in columns: rows must be of one length, in order, in a cache that lies side by side")
        gates = self.gates(x).sigmoid().unflatten(-1, (3, self.heads)).permute(2, 0, 3, 1)[..., None]
        out = sum((gate * branch for gate, branch in zip(gates, self.branches(query, view), strict=True)), torch.zeros_like(query))
        mixed: Tensor = self.o(out.transpose(1, 2).flatten(2))
        return mixed

    def project(
        self, x: Float[Tensor, "b s d"], rotation: Rotation
    ) -> tuple[Float[Tensor, "b h s e"], Float[Tensor, "b g s e"], Float[Tensor, "b g s e"]]:
        """Queries, and keys and values of the three branches, turned to their positions."""
        query = rotation(self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2))
        keys, values = self.kv(x).unflatten(-1, (6 * self.kv_heads, -1)).transpose(1, 2).chunk(2, dim=1)
        return query, rotation(keys), values

    def compressed(self, query: Float[Tensor, "b h s e"], view: LayerView) -> tuple[Float[Tensor, "b h s e"], Int[Tensor, "b g s k"]]:
        """The compressed branch, and the blocks that its weights choose."""
        keys, values = view.keys[:, : self.kv_heads], view.values[:, : self.kv_heads]
        blocks = self.key_map(blocks_of(keys, self.sizes)), self.value_map(blocks_of(values, self.sizes))
        out, weights = coarse(query, *blocks, keys.shape[2], self.sizes)
        return out, choose(importance(weights, self.kv_heads, keys.shape[2], self.sizes), keys.shape[2], self.sizes)

    def branches(self, query: Float[Tensor, "b h s e"], view: LayerView) -> tuple[Tensor, Tensor, Tensor]:
        """What each branch makes of the queries [b h s e]: compressed, chosen, window."""
        keys, values = view.keys.chunk(3, dim=1), view.values.chunk(3, dim=1)
        far, index = self.compressed(query, view)
        near, _ = banded(query, keys[2], values[2], self.sizes.window)
        return far, fine(query, keys[1], values[1], index, self.sizes), near
