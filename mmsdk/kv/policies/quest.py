"""Query-aware choice of pages: nothing is dropped, little is read (Quest, arXiv 2406.10774).

    worth of a page = sum_c max(q_c min_c, q_c max_c)        min, max: of the page's keys, channel by channel

No key of the page has a larger product with the query, so that a page of small worth can hold no token of large weight. The pages of
largest worth are read, exactly.

[published] pages of 16 tokens, the bound, the first two layers read whole. [ours] the heads of a key-value head choose together, by the
largest bound among them, so that a page is read once; the newest page is always among the chosen.

Letters: b rows, h heads, g key-value heads, n pages, m tokens of a page, k chosen pages, d width.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import BudgetError
from mmsdk.kernels.ops.block_worth import block_worth
from mmsdk.kv.blocked import blocked, folded, least_of, most_of
from mmsdk.kv.entries import Entries
from mmsdk.kv.policy import Ask
from mmsdk.kv.shelf import attended

__all__ = ["Quest"]


@dataclass(frozen=True, slots=True)
class Quest:
    """Pages of `page` tokens; the first `dense` layers read everything. Raises BudgetError for pages of no token."""

    page: int = 16
    dense: int = 2

    def __post_init__(self) -> None:
        if self.page < 1:
            raise BudgetError(f"quest chooses pages of at least one token, got page={self.page}")

    def read(self, query: Float[Tensor, "b h 1 d"], entries: Entries, ask: Ask, keep: Int[Tensor, " b"]) -> Float[Tensor, "b h 1 d"]:
        """The best pages, exactly, and the newest, which need not be full; all of it in layers with a window of their own."""
        blocks = blocked(entries, self.page)
        least, most = (-(-amount // self.page) for amount in (least_of(entries, keep), most_of(entries, keep)))
        # a row of a smaller budget reads no more beside others than alone
        if least >= blocks.count or ask.window:
            return attended(query, entries, ask)
        low, high = folded(blocks, "amin", torch.inf), folded(blocks, "amax", -torch.inf)
        rank = worth(query[:, :, 0], low, high, blocks.sizes).scatter(2, blocks.last[:, None].expand(-1, low.shape[1], -1), torch.inf)
        index = best(rank, (keep + self.page - 1) // self.page, most)
        # the two bounds of a page are as large as a pair of key and value
        entries.read = low.shape[0] * low.shape[1] * (index.shape[2] * self.page + blocks.count)
        return blocks.read(query, index, torch.zeros(index.shape, device=index.device))


def worth(
    query: Float[Tensor, "b h d"], low: Float[Tensor, "b g n d"], high: Float[Tensor, "b g n d"], sizes: Int[Tensor, "b n"]
) -> Float[Tensor, "b g n"]:
    """The largest product that a key of each page may have with any query of its group, in float32; -inf for a page without tokens.

    max(q low, q high) is q high where q is above 0, else q low: two products of matrices (`mmsdk.kernels.ops.block_worth`).
    """
    bias = torch.zeros_like(sizes, dtype=torch.float32).masked_fill_(sizes == 0, -torch.inf)[:, None].expand(low.shape[:3])
    return block_worth(query[:, :, None], high, low, bias, 1.0, together=True)[:, :, 0, 0]


def best(rank: Float[Tensor, "b g n"], pages: Int[Tensor, " b"], most: int) -> Int[Tensor, "b g k"]:
    """The `pages` of each row that rank first, k = min(most, n) places, -1 where there are fewer."""
    chosen = rank.topk(min(most, rank.shape[2]), dim=-1)
    late = torch.arange(chosen.indices.shape[2], device=rank.device) >= pages[:, None]
    return chosen.indices.masked_fill((chosen.values == -torch.inf) | late[:, None], -1)
