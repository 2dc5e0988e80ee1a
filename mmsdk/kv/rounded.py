"""A store that keeps the last tokens as they are and older ones in fewer bits (KIVI, arXiv 2402.02750, or TurboQuant).

A row's tokens go into exact blocks. When more than `window` of them lie behind its oldest block, that block is rounded, keys per channel
and values per token, and its memory is free again. Rounded blocks are shared by forks and selected rows like any other, and never written.

[published] the grouping, the residual window, asymmetric rounding; prompts are attended to exactly while they are read. [ours] blocks as
groups, a window of 128, and prompts read in chunks: a chunk sees itself and the window exactly, and what lies before them as it is kept.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import launchable
from mmsdk.kernels.cpu.rounded import Aged, Kept
from mmsdk.kernels.older import Older, reads
from mmsdk.kernels.ops.kv_round import kv_round
from mmsdk.kernels.rounding import LEVELS
from mmsdk.kernels.turbo import TURBO, centroids, rotation
from mmsdk.kv.blocks import Blocks, PoolFullError
from mmsdk.kv.pages import Pages, RowPages, Where
from mmsdk.kv.rounding import Bits, Codes, decode, encode, group, per_value, scale_dtype
from mmsdk.kv.types import LayerView, View

__all__ = ["PAGE", "WINDOW", "RoundedPages"]

PAGE = 32
WINDOW = 128


class Rounded:
    """Codes [layers blocks page g p] of keys or of values, with a scale and a minimum for each group along `dim` of a block."""

    def __init__(self, shape: tuple[int, int, int, int, int], dim: int, bits: Bits, dtype: torch.dtype, device: torch.device) -> None:
        layers, columns, page, g, d = shape
        self._dim, self._bits, self._width, self._dtype = group(bits, dim, channels=4), bits, d, dtype
        packed = -(-d * per_value(bits) // 8)
        self._codes: UInt8[Tensor, "layers blocks page g p"] = torch.empty(
            layers, columns, page, g, packed, dtype=torch.uint8, device=device
        )
        groups = [size if place != self._dim else 1 for place, size in enumerate(shape)]
        self._scale, self._low = (torch.empty(groups, dtype=scale_dtype(dtype), device=device) for _ in range(2))

    @property
    def kept(self) -> Kept:
        """All of it, as it lies."""
        return Kept(self._codes, self._scale, self._low)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self._codes[0, 0].nbytes + self._scale[0, 0].nbytes + self._low[0, 0].nbytes

    def put(
        self, layers: range, exact: Float[Tensor, "layers blocks page g d"], source: Int[Tensor, " k"], columns: Int[Tensor, " k"]
    ) -> None:
        """Round these whole blocks of a pool of all layers into these columns."""
        here = slice(layers.start, layers.stop)
        kept = self._codes[here], self._scale[here], self._low[here]
        if self._bits in LEVELS:
            kv_round(exact[here], source, columns, *kept, self._bits, channels=self._dim == 2)
            return
        found = encode(exact[here, source], self._dim, self._bits)
        for pool, part in zip(kept, (found.codes, found.scale, found.low), strict=True):
            pool[:, columns] = part

    def adopt(self, other: "Rounded", layers: range, source: Int[Tensor, " k"], columns: Int[Tensor, " k"]) -> None:
        """Copy these blocks of another pool of the same kind into these columns."""
        here = slice(layers.start, layers.stop)
        for mine, theirs in ((self._codes, other._codes), (self._scale, other._scale), (self._low, other._low)):
            mine[here, columns] = theirs[here, source]

    def of(self, layer: int) -> Codes:
        """All blocks of a layer, as they lie."""
        return Codes(self._codes[layer], self._scale[layer], self._low[layer])

    def get(self, layer: int, columns: Int[Tensor, " k"]) -> Float[Tensor, "k page g d"]:
        """Blocks of a layer as numbers again."""
        return decode(self.of(layer).at(columns), self._bits, self._width, self._dtype)


class RoundedPages:
    """See `mmsdk.kv.pages.Store`. `recent` are the exact blocks, `old` tells who holds which rounded one."""

    def __init__(
        self,
        recent: Pages,
        bits: Bits,
        columns: int,
        window: int = WINDOW,
    ) -> None:
        """Beside exact blocks, so many rounded ones of the same size in each layer. Raises InputError where values are not like keys."""
        if recent.values.shape != recent.keys.shape:
            raise InputError("latents of a token are not kept in fewer bits; choose dense or paged", item="kv")
        self.recent, self.bits, self.window = recent, bits, window
        self.blocks, self.old = recent.blocks, Blocks(recent.layers, columns)
        layers, _, page, g, d = recent.keys.shape
        shape = layers, columns, page, g, d
        self._keys = Rounded(shape, 2, bits, recent.keys.dtype, recent.device)
        self._values = Rounded(shape, 4, bits, recent.keys.dtype, recent.device)
        turning = (centroids(TURBO[bits]), rotation(d)) if bits in TURBO else (torch.empty(0), torch.empty(0, 0))
        self._aged = Aged.of(bits, self._keys.kept, self._values.kept, *turning)
        self._turning = (turning[1].to(recent.device).contiguous(),) if bits in TURBO else ()

    @property
    def layers(self) -> int:
        """Layers of the model that it is for."""
        return self.recent.layers

    @property
    def page(self) -> int:
        """Tokens of a block, exact or rounded."""
        return self.recent.page

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.recent.device

    @property
    def rounded_bytes(self) -> int:
        """Bytes of the keys and values of a rounded block in one layer."""
        return self._keys.block_bytes + self._values.block_bytes

    def nbytes(self, row: RowPages) -> int:
        """See `Store`."""
        return self.recent.nbytes(row) + len(row.aged) * self.rounded_bytes

    def fits(self, layers: range, rows: Sequence[RowPages], new: int) -> bool:
        """See `Store`. What ages makes room where nobody else holds it."""
        due = [column for row in rows for column in row.columns[: self._due(row)]]
        room = self.blocks.free(layers) + sum(not self.blocks.shared(layers, column) for column in due)
        return len(due) <= self.old.free(layers) and sum(row.missing(self, layers, new) for row in rows) <= room

    def hold(self, layers: range, row: RowPages) -> None:
        """See `Store`."""
        self.recent.hold(layers, row)
        self.old.hold(layers, row.aged)

    def give(self, layers: range, row: RowPages) -> None:
        """See `Store`."""
        self.recent.give(layers, row)
        self.old.give(layers, row.aged)

    def age(self, layers: range, rows: Sequence[RowPages]) -> bool:
        """Round the blocks of each row that lie wholly before its window. Raises PoolFullError where there is no room for them."""
        dues = [self._due(row) for row in rows]
        fresh = self.old.take(layers, sum(dues)) if any(dues) else []
        for row, due in [pair for pair in zip(rows, dues, strict=True) if pair[1]]:
            new, fresh = fresh[:due], fresh[due:]
            source, columns = torch.tensor([row.columns[:due], new], device=self.device)
            for pool, rounded in ((self.recent.keys, self._keys), (self.recent.values, self._values)):
                rounded.put(layers, pool, source, columns)
            self.blocks.give(layers, row.grow_old(new, self.page))
        return any(dues)

    def write(self, layer: int, slots: Int[Tensor, " n"], keys: Float[Tensor, "n g d"], values: Float[Tensor, "n g d"]) -> None:
        """See `Store`."""
        self.recent.write(layer, slots, keys, values)

    def copy(self, layers: range, source: int, target: int) -> None:
        """See `Store`."""
        self.recent.copy(layers, source, target)

    def adopt(self, other: "RoundedPages", layers: range, rows: Sequence[RowPages]) -> list[RowPages]:
        """Rows of another pool of the same kind, copied, and held here once. Raises PoolFullError, holding none, where there is no room."""
        columns, aged = [column for row in rows for column in row.columns], [column for row in rows for column in row.aged]
        exact = self.blocks.take(layers, len(columns))
        try:
            rounded = self.old.take(layers, len(aged))
        except PoolFullError:
            self.blocks.give(layers, exact)
            raise
        here = slice(layers.start, layers.stop)
        source, target = torch.tensor([columns, exact], dtype=torch.long, device=self.device)
        for mine, theirs in ((self.recent.keys, other.recent.keys), (self.recent.values, other.recent.values)):
            mine[here, target] = theirs[here, source]
        source, target = torch.tensor([aged, rounded], dtype=torch.long, device=self.device)
        self._keys.adopt(other._keys, layers, source, target)
        self._values.adopt(other._values, layers, source, target)
        first, second = iter(exact), iter(rounded)
        return [RowPages(list(islice(first, len(row.columns))), row.length, list(islice(second, len(row.aged)))) for row in rows]

    def view(self, layer: int, where: Where) -> View:
        """The tokens where they lie, for kernels that read codes; else side by side, in the columns of the view, as numbers again."""
        if launchable(self.recent.keys) and reads(self.bits, self.page):
            view = self.recent.view(layer, where)
            pools = self._keys.of(layer), self._values.of(layer)
            older = Older(self.bits, *pools, where.aged_table, where.aged_counts, self._turning)
            return replace(view, older=(older,)) if len(where.aged) else view
        keys = self._side_by_side(self._keys.get(layer, where.aged), self.recent.keys[layer], where)
        values = self._side_by_side(self._values.get(layer, where.aged), self.recent.values[layer], where)
        return LayerView(keys, values, where.positions, where.valid, where.lengths, where.ordered)

    def aged(self, layers: range, where: Where) -> Aged:
        """The rounded blocks of these rows, for who reads them as they lie."""
        return self._aged.among(layers.start, [(row, column) for row, pages in enumerate(where.rows) for column in pages.aged])

    def _side_by_side(
        self, old: Float[Tensor, "k page g d"], recent: Float[Tensor, "blocks page g d"], where: Where
    ) -> Float[Tensor, "b g t d"]:
        slots = recent.flatten(0, 1)
        out = slots.new_zeros(*where.positions.shape, *slots.shape[1:])
        aged = old.flatten(0, 1).split([len(row.aged) * self.page for row in where.rows])
        for place, (before, stretches) in enumerate(zip(aged, where.stretches, strict=True)):
            row = torch.cat([before, *(slots[start:stop] for start, stop in stretches)])
            if len(row) == out.shape[1]:
                out[place] = row
            else:
                out[place, where.valid[place]] = row
        return out.transpose(1, 2)

    def _due(self, row: RowPages) -> int:
        return max(0, row.length - self.window) // self.page
