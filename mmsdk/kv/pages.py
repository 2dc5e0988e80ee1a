"""The memory of a paged cache (PagedAttention, arXiv 2309.06180): blocks of 16 tokens of every layer, and where a row has its own.

What a store remembers exactly it keeps for as long as it is held; one that rounds (`mmsdk.kv.rounded`) lets full blocks age.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import launchable
from mmsdk.kernels.ops.kv_store import kv_store
from mmsdk.kv.blocks import Blocks
from mmsdk.kv.types import Fronts, PagedView, View

__all__ = ["PAGE", "Pages", "RowPages", "Store", "Where"]

PAGE = 16


@dataclass(frozen=True, slots=True)
class Where:
    """Where the rows of some layers lie: their pages, the blocks of these as a table and as stretches, and the aged ones of all rows.

    Where any row has aged blocks, `aged_table` has those of each, filled up with 0, and `aged_counts` says how many.

    The rest is as in `PagedView`.
    """

    rows: "tuple[RowPages, ...]"
    table: Int[Tensor, "b most"]
    stretches: tuple[tuple[tuple[int, int], ...], ...]
    fronts: Fronts
    aged: Int[Tensor, " k"]
    aged_table: Int[Tensor, "_ most_aged"]
    aged_counts: Int[Tensor, "_"]
    positions: Int[Tensor, "b t"]
    valid: Bool[Tensor, "b t"]
    lengths: Int[Tensor, " b"]
    ordered: bool
    ascending: bool


@runtime_checkable
class Store(Protocol):
    """Memory in blocks, of which a paged cache holds some. `blocks` are those that new tokens go into."""

    blocks: Blocks

    @property
    def layers(self) -> int:
        """Layers of the model that it is for."""
        ...

    @property
    def page(self) -> int:
        """Tokens of a block."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it is."""
        ...

    def nbytes(self, row: "RowPages") -> int:
        """Bytes of one layer of what a row holds."""
        ...

    def fits(self, layers: range, rows: "Sequence[RowPages]", new: int) -> bool:
        """Whether there is room for so many more tokens of each row."""
        ...

    def hold(self, layers: range, row: "RowPages") -> None:
        """One more holder of all that a row holds."""
        ...

    def give(self, layers: range, row: "RowPages") -> None:
        """One holder less."""
        ...

    def age(self, layers: range, rows: "Sequence[RowPages]") -> bool:
        """Move what is no longer recent to where it takes less; whether anything was."""
        ...

    def write(self, layer: int, slots: Int[Tensor, " n"], keys: Float[Tensor, "n g d"], values: Float[Tensor, "n g e"]) -> None:
        """Store tokens of a layer, each in its slot (block * page + place in it)."""
        ...

    def copy(self, layers: range, source: int, target: int) -> None:
        """Copy one block to another in these layers."""
        ...

    def view(self, layer: int, where: Where) -> View:
        """What these rows hold in a layer."""
        ...


class Pages:
    """Keys [layers blocks page g d] and values [layers blocks page g e], and who holds which block. Nothing is ever moved to make room."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int | tuple[int, int],
        columns: int,
        dtype: torch.dtype,
        device: torch.device | str,
        page: int = PAGE,
    ) -> None:
        """Two widths are those of keys and of values. Raises InputError for a size below one, but for values of no width."""
        widths = (head_dim, head_dim) if isinstance(head_dim, int) else head_dim
        for name, size in (("kv_heads", kv_heads), ("head_dim", widths[0]), ("page", page)):
            if size < 1:
                raise InputError(f"it is {size}, it must be at least 1", item=name)
        self.blocks = Blocks(layers, columns)
        shape = layers, columns, page, kv_heads
        self.keys: Float[Tensor, "layers blocks page g d"] = torch.empty(*shape, widths[0], dtype=dtype, device=device)
        self.values: Float[Tensor, "layers blocks page g e"] = torch.empty(*shape, widths[1], dtype=dtype, device=device)

    @property
    def layers(self) -> int:
        """Layers of the model that it is for."""
        return self.keys.shape[0]

    @property
    def page(self) -> int:
        """Tokens of a block."""
        return self.keys.shape[2]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: the keys and values of a page of tokens in one layer."""
        return self.keys[0, 0].nbytes + self.values[0, 0].nbytes

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.keys.device

    def needed(self, tokens: int) -> int:
        """Columns for so many tokens of one row."""
        return -(-tokens // self.page)

    def nbytes(self, row: "RowPages") -> int:
        """See `Store`."""
        return len(row.columns) * self.block_bytes

    def fits(self, layers: range, rows: "Sequence[RowPages]", new: int) -> bool:
        """See `Store`."""
        return sum(row.missing(self, layers, new) for row in rows) <= self.blocks.free(layers)

    def hold(self, layers: range, row: "RowPages") -> None:
        """See `Store`."""
        self.blocks.hold(layers, row.columns)

    def give(self, layers: range, row: "RowPages") -> None:
        """See `Store`."""
        self.blocks.give(layers, row.columns)

    def age(self, layers: range, rows: "Sequence[RowPages]") -> bool:
        """Nothing ages."""
        return False

    def view(self, layer: int, where: Where) -> PagedView:
        """Where the tokens lie."""
        seen = where.positions, where.valid, where.lengths, where.ordered, where.ascending
        return PagedView(self.keys[layer], self.values[layer], where.table, where.stretches, where.fronts, *seen)

    def write(self, layer: int, slots: Int[Tensor, " n"], keys: Float[Tensor, "n g d"], values: Float[Tensor, "n g e"]) -> None:
        """Store tokens of a layer, each in its slot (block * page + place in it)."""
        if launchable(self.keys):
            kv_store(keys, values, slots, self.keys[layer], self.values[layer])
            return
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def copy(self, layers: range, source: int, target: int) -> None:
        """Copy one column to another in these layers."""
        for pool in (self.keys, self.values):
            pool[layers.start : layers.stop, target] = pool[layers.start : layers.stop, source]


class RowPages:
    """The columns that hold one row's tokens, in order, and how many tokens these are; `aged` are those of the tokens before them."""

    __slots__ = ("_runs", "aged", "columns", "length")

    def __init__(self, columns: Sequence[int], length: int, aged: Sequence[int] = ()) -> None:
        self.columns = list(columns)
        self.length = length
        self.aged = list(aged)
        self._look()

    def copy(self, page: int) -> "RowPages":
        """The same tokens, to go on with by itself; columns that are still empty are not shared."""
        return RowPages(self.columns[: -(-self.length // page)], self.length, self.aged)

    def missing(self, store: Store, layers: range, new: int) -> int:
        """How many columns `reserve` would take."""
        return self._beyond(store, new) + self._splits(store, layers, new)

    def reserve(self, store: Store, layers: range, new: int) -> bool:
        """Hold room for so many more tokens, none of it shared; whether any column changed. Raises PoolFullError, changing nothing."""
        split = self._splits(store, layers, new)
        wanted = self._beyond(store, new) + split
        if not wanted:
            return False
        fresh = store.blocks.take(layers, wanted, self.columns[-1] if self.columns and not split else -1)
        if split:
            last = self.length // store.page
            store.copy(layers, self.columns[last], fresh[0])
            store.blocks.give(layers, [self.columns[last]])
            self.columns[last] = fresh.pop(0)
        self.columns += fresh
        self._look()
        return True

    def grow_old(self, aged: Sequence[int], page: int) -> list[int]:
        """Its first columns have moved to these; those that they were."""
        moved, self.columns = self.columns[: len(aged)], self.columns[len(aged) :]
        self.aged, self.length = [*self.aged, *aged], self.length - len(aged) * page
        self._look()
        return moved

    def cut(self, store: Store, layers: range, tokens: int) -> int:
        """Hold only the first so many tokens, or fewer: a column that has aged is kept whole or not at all. How many are left."""
        page = store.page
        aged = min(len(self.aged), tokens // page)
        left = tokens if aged == len(self.aged) else aged * page
        self.length = left - aged * page
        columns = -(-self.length // page)
        store.give(layers, RowPages(self.columns[columns:], 0, self.aged[aged:]))
        self.columns, self.aged = self.columns[:columns], self.aged[:aged]
        self._look()
        return left

    def slot(self, page: int) -> int:
        """Where the next token goes, which `reserve` made room for."""
        return self.columns[self.length // page] * page + self.length % page

    def slots(self, new: int, page: int) -> Int[Tensor, " n"]:
        """Where so many next tokens go."""
        first = self.length // page
        places = torch.arange(self.length, self.length + new)
        return torch.tensor(self.columns[first:], dtype=torch.int64)[places // page - first] * page + places % page

    def stretches(self, page: int) -> tuple[tuple[int, int], ...]:
        """The slots of all tokens as ranges, in order."""
        found, left = list[tuple[int, int]](), self.length
        for start, stop in self._runs:
            size = min(left, (stop - start) * page)
            if size:
                found.append((start * page, start * page + size))
            left -= size
        return tuple(found)

    def _beyond(self, store: Store, new: int) -> int:
        """Columns that new tokens need behind those that are there."""
        return max(-(-(self.length + new) // store.page) - len(self.columns), 0)

    def _splits(self, store: Store, layers: range, new: int) -> bool:
        """Whether new tokens would go into a block that others hold too."""
        begun = new > 0 and self.length % store.page > 0
        return begun and store.blocks.shared(layers, self.columns[self.length // store.page])

    def _look(self) -> None:
        # Runs of neighbours, kept until the columns change: once in a page of tokens.
        ends = [place for place in range(1, len(self.columns)) if self.columns[place] != self.columns[place - 1] + 1]
        bounds = [0, *ends, len(self.columns)] if self.columns else []
        self._runs = [(self.columns[start], self.columns[stop - 1] + 1) for start, stop in pairwise(bounds)]
