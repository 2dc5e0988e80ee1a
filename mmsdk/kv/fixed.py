"""One decode step over the pages of a pool in tensors that stay where they are, as a CUDA graph wants them.

    fixed = FixedCache(pages, rows=4, most=64)
    for pages, where in cache.step():           # a paged cache has made room for a token of each of its rows
        fixed.fill(where, positions, shift)     # copied into the same memory every time
    decoder(embeddings, fixed.position[:, None], fixed)

There may be fewer rows than it is for: the others are nobody's, hold nothing, store nothing and see nothing. How long rows are and where
their blocks lie is read from tensors alone, so that a graph that was recorded once holds for every later step.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kernels.ops.kv_store import kv_store
from mmsdk.kv.pages import Pages, Where
from mmsdk.kv.types import Fronts, LayerView, PagedView

__all__ = ["FixedCache"]


class FixedCache:
    """See `mmsdk.kv.types.KVCache`, of which it is what a step of one token a row asks for.

    It holds the memory of the pool and not the pool, so that whoever remembers it does not keep one that is gone from being seen as such.
    """

    def __init__(self, pages: Pages, rows: int, most: int) -> None:
        """For up to so many rows of up to so many blocks each."""
        device = pages.device
        self._keys, self._values, self._page = pages.keys, pages.values, pages.page
        self.position: Int[Tensor, " b"] = torch.zeros(rows, dtype=torch.long, device=device)
        self.shift: Int[Tensor, " b"] = torch.zeros_like(self.position)
        self.counts: Int[Tensor, " b"] = torch.zeros_like(self.position)
        self.table: Int[Tensor, "b most"] = torch.zeros(rows, most, dtype=torch.long, device=device)
        self._columns: Int[Tensor, "b t"] = torch.arange(most * pages.page, device=device).expand(rows, -1)
        # Of a step: a graph works them out anew from what stands above.
        self._slots, self._valid = self.counts, self._columns >= 0
        # For whoever reads pages on a processor, which has to know what is in the tensors; a kernel looks there.
        self._table_of = self.table[:0]
        self._fronts = Fronts(self.table, (0,) * rows, pages.page, (self.counts,))
        self._stretches: tuple[tuple[tuple[int, int], ...], ...] = ((),) * rows

    def fill(self, where: Where, position: Int[Tensor, " r"], shift: Int[Tensor, " r"]) -> None:
        """Take the rows of a paged cache that has made room for a token of each, which stands at this position."""
        rows, nobodys = len(position), len(self.counts) - len(position)
        for mine, theirs in ((self.position, position), (self.shift, shift), (self.counts, where.fronts.counts)):
            mine[:rows] = theirs
            mine[rows:] = 0
        # the same object as long as no row takes another block
        if where.table is not self._table_of:
            self.table[:rows, : where.table.shape[1]] = where.table
            self._table_of = where.table
        self._fronts = Fronts(self.table, (*where.fronts.lengths, *(0,) * nobodys), self._page, (self.counts,))
        self._stretches = (*where.stretches, *((),) * nobodys)

    def next(self, layer: int) -> Int[Tensor, " b"]:
        """The position of the token of each row, in all layers."""
        return self.position

    def advance(self, positions: Int[Tensor, "b s"], layers: range | None = None) -> None:
        """Find the slot of each new token, -1 for a row that is nobody's; there is room already."""
        last = (self.counts - 1).clamp_min(0)
        home = self.table.gather(1, last[:, None] // self._page)[:, 0] * self._page + last % self._page
        self._slots = home.where(self.counts > 0, -1)
        self._valid = self._columns < self.counts[:, None]

    def append(self, layer: int, keys: Float[Tensor, "b g 1 d"], values: Float[Tensor, "b g 1 e"]) -> PagedView:
        """Store the token of each row; columns of the view count its tokens."""
        kv_store(keys[:, :, 0], values[:, :, 0], self._slots, self._keys[layer], self._values[layer])
        keys_of, values_of, seen = self._keys[layer], self._values[layer], (self._columns, self._valid, self.counts)
        return PagedView(keys_of, values_of, self.table, self._stretches, self._fronts, *seen, ordered=False, ascending=True)

    def turn(self, following: Int[Tensor, " b"]) -> None:
        """Nobody asks: `fill` says where words stand."""
        raise AssertionError("a step only adds tokens")

    def view(self, layer: int) -> LayerView:
        """Nobody asks."""
        raise AssertionError("a step only adds tokens")

    def keep(self, layer: int, index: Int[Tensor, "b k"]) -> None:
        """Nobody asks."""
        raise AssertionError("a step only adds tokens")

    def fork(self) -> "FixedCache":
        """Nobody asks."""
        raise AssertionError("a step only adds tokens")

    def select(self, rows: Int[Tensor, " r"]) -> "FixedCache":
        """Nobody asks."""
        raise AssertionError("a step only adds tokens")
