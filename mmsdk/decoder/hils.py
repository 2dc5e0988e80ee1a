"""HiLS as a layer's attention; see `mmsdk.attention.hils` for what it computes.

[published] the landmark query of a chunk comes from its last token by a low-rank map (rank 64). [reconstruction] a window's keys are
rotated and those of chunks are not, as in its predecessor (HSA, arXiv 2511.23319): what is far has no position to be wrong about, which is
what lets it reach beyond the length of training.
"""

import torch
from jaxtyping import Float
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
        split = self.heads, self.kv_heads, self.kv_heads
        query, key, value = self.qkv(x).unflatten(-1, (sum(split), -1)).transpose(1, 2).split(split, dim=1)
        marks = self.landmark(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        view = cache.append(layer, torch.cat((key, marks), dim=1), torch.cat((value, torch.zeros_like(value)), dim=1))
        if not isinstance(view, LayerView) or not view.ordered:
            raise InputError("HiLS counts chunks in columns: rows must be of one length, in order, in a cache that lies side by side")
        out: Tensor = self.o(self.attend(query, view).transpose(1, 2).flatten(2))
        return out

    def attend(self, query: Float[Tensor, "b h s e"], view: LayerView) -> Float[Tensor, "b h s e"]:
        """The queries, which are the last columns of the view, over their windows and chunks."""
        (keys, marks), values = view.keys.chunk(2, dim=1), view.values[:, : self.kv_heads]
        near = self._near(query, keys, values)
        whole, size = keys.shape[2] // self.sizes.chunk * self.sizes.chunk, self.sizes.chunk
        if whole == 0:
            return near[0]
        inside, behind = (part[:, :, :whole].unflatten(2, (-1, size)) for part in (keys, values))
        far, bias = landmarks(marks[:, :, size - 1 : whole : size], inside)
        places = torch.arange(keys.shape[2] - query.shape[2], keys.shape[2], device=keys.device)
        scores = worth(query, far, bias, places, self.sizes)
        index = chosen(scores, near[1].unflatten(1, (self.kv_heads, -1)), self.sizes.topk)
        return mixed(query, inside, behind, scores, index, near)

    def _near(
        self, query: Float[Tensor, "b h s e"], keys: Float[Tensor, "b g t e"], values: Float[Tensor, "b g t e"]
    ) -> tuple[Float[Tensor, "b h s e"], Float[Tensor, "b h s"]]:
        """The window, rotated: of the cache only the columns that some query's window reaches."""
        tokens, new = keys.shape[2], query.shape[2]
        first = max(0, tokens - new - self.sizes.window + 1)
        rotation = self.rope(torch.arange(first, tokens, device=keys.device)[None], keys.dtype)
        last = self.rope(torch.arange(tokens - new, tokens, device=keys.device)[None], query.dtype)
        return banded(last(query), rotation(keys[:, :, first:]), values[:, :, first:], self.sizes.window)
