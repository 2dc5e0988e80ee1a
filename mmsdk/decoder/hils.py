"""HiLS as a layer's attention; see `mmsdk.attention.hils` for what it computes.

[published] the landmark query of a chunk comes from its last token by a low-rank map (rank 64). [reconstruction] a window's keys are
rotated and those of chunks are not, as in its predecessor (HSA, arXiv 2511.23319): what is far has no position to be wrong about, which is
what lets it reach beyond the length of training.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mmsdk.attention.banded import banded
from mmsdk.attention.hils import Hierarchy, chosen, landmarks, mixed, worth
from mmsdk.decoder.linear import Linear
from mmsdk.decoder.rope import Rope
from mmsdk.errors import InputError
from mmsdk.kv.types import KVCache, LayerView

__all__ = ["LandmarkAttention"]


class LandmarkAttention(nn.Module):
    """Needs a cache of 2 `kv_heads` heads: unrotated keys with their values, and landmark queries, whose values are zeros.

    Landmarks are made anew from the cached keys in every pass.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, sizes: Hierarchy, rope: Rope, rank: int = 64) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.sizes, self.rope = heads, kv_heads, sizes, rope
        self.qkv = Linear(width, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.landmark = nn.Sequential(Linear(width, rank, bias=False), Linear(rank, kv_heads * head_dim, bias=False))
        self.o = Linear(heads * head_dim, width, bias=False)

    def forward(self, x: Float[Tensor, "b s d"], cache: KVCache, layer: int) -> Float[Tensor, "b s d"]:
        """Attend from the new tokens to all that the cache then holds; the caller has announced them by `cache.advance`.

        Raises InputError for rows with padding, or of several lengths.
        """
        query, keys, values = self.project(x)
        view = cache.append(layer, keys, values)
        if not isinstance(view, LayerView) or not view.ordered:
            raise InputError("HiLS counts chunks in columns: rows must be of one length, in order, in a cache that lies side by side")
        out: Tensor = self.o(self.attend(query, view).transpose(1, 2).flatten(2))
        return out

    def project(self, x: Float[Tensor, "b s d"]) -> tuple[Float[Tensor, "b h s e"], Float[Tensor, "b g s e"], Float[Tensor, "b g s e"]]:
        """Queries, and what the cache holds: keys and landmark queries, values and zeros."""
        split = self.heads, self.kv_heads, self.kv_heads
        query, key, value = self.qkv(x).unflatten(-1, (sum(split), -1)).transpose(1, 2).split(split, dim=1)
        marks = self.landmark(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        return query, torch.cat((key, marks), dim=1), torch.cat((value, torch.zeros_like(value)), dim=1)

    def attend(self, query: Float[Tensor, "b h s e"], view: LayerView) -> Float[Tensor, "b h s e"]:
        """The queries, which are the last columns of the view, over their windows and chunks."""
        near = self.near(query, view)
        if view.keys.shape[2] < self.sizes.chunk:
            return near[0]
        scores, index = self.choice(query, view, near[1])
        inside, behind = (self._chunks(part[:, : self.kv_heads]) for part in (view.keys, view.values))
        return mixed(query, inside, behind, scores, index, near)

    def choice(
        self, query: Float[Tensor, "b h s e"], view: LayerView, near: Float[Tensor, "b h s"]
    ) -> tuple[Float[Tensor, "b g r s c"], Int[Tensor, "b g s k"]]:
        """The scores of all chunks, of which there must be one, and the chunks that are read; `near` is the window's log-sum-exp."""
        keys, marks = view.keys.chunk(2, dim=1)
        far, bias = landmarks(self._chunks(marks)[:, :, :, -1], self._chunks(keys))
        places = torch.arange(keys.shape[2] - query.shape[2], keys.shape[2], device=keys.device)
        scores = worth(query, far, bias, places, self.sizes)
        return scores, chosen(scores, near.unflatten(1, (self.kv_heads, -1)), self.sizes.topk)

    def _chunks(self, x: Float[Tensor, "b g t e"]) -> Float[Tensor, "b g c m e"]:
        """The complete chunks. A view."""
        complete: Tensor = x[:, :, : x.shape[2] // self.sizes.chunk * self.sizes.chunk].unflatten(2, (-1, self.sizes.chunk))
        return complete

    def near(self, query: Float[Tensor, "b h s e"], view: LayerView) -> tuple[Float[Tensor, "b h s e"], Float[Tensor, "b h s"]]:
        """The window, rotated, and its log-sum-exp: of the cache only the columns that some query's window reaches."""
        keys, values = view.keys[:, : self.kv_heads], view.values[:, : self.kv_heads]
        tokens, new = keys.shape[2], query.shape[2]
        first = max(0, tokens - new - self.sizes.window + 1)
        rotation = self.rope(torch.arange(first, tokens, device=keys.device)[None], keys.dtype)
        last = self.rope(torch.arange(tokens - new, tokens, device=keys.device)[None], query.dtype)
        return banded(last(query), rotation(keys[:, :, first:]), values[:, :, first:], self.sizes.window)
