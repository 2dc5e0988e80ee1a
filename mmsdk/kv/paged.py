"""The paged cache: the tokens of each row in blocks of a pool that many caches share, without padding and without room kept ahead.

    pages = Pages(layers, kv_heads, head_dim, columns, dtype, device)
    cache = PagedCache.empty(pages, rows=2)

Rows grow by taking a block, never by copying. A fork, or a row selected twice, shares the blocks; whoever writes into a block that
others hold too copies that one first. Blocks go back to the pool when a cache is released or dies, whatever the reason.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels.cpu.layer import Place
from mmsdk.kernels.cpu.prompt import Memory
from mmsdk.kv.blocks import PoolFullError
from mmsdk.kv.pages import Pages, RowPages, Store, Where
from mmsdk.kv.rounded import RoundedPages
from mmsdk.kv.sheet import Arrival, Sheet
from mmsdk.kv.slots import Slots, joined
from mmsdk.kv.types import LayerView, PagedView, View

__all__ = ["PagedCache"]


class PagedCache:
    """See `mmsdk.kv.types.KVCache`. Layers that hold the same tokens share one sheet; sheets lie over the layers in order.

    `promise` lives as long as any cache that came of this one: forks and selected rows go on in the room that it was promised.
    """

    def __init__(self, store: Store, sheets: Sequence[Sheet], shift: Int[Tensor, " b"], promise: object = None) -> None:
        self._store = store
        self._sheets = list(sheets)
        self.shift = shift
        self.promise = promise

    @classmethod
    def empty(cls, store: Store, rows: int) -> "PagedCache":
        """Rows without tokens, which hold no block. Raises InputError for less than one."""
        if rows < 1:
            raise InputError(f"it is {rows}, it must be at least 1", item="rows")
        return cls.of(store, [RowPages((), 0) for _ in range(rows)])

    @classmethod
    def of(cls, store: Store, rows: Sequence[RowPages]) -> "PagedCache":
        """Rows that share these columns of all layers, which are filled with tokens at positions 0, 1, 2, ..."""
        device, most = store.device, max(row.length for row in rows)
        lengths = torch.tensor([row.length for row in rows], device=device)
        slots = Slots.empty(len(rows), max(store.page, most), device)
        slots.fill((torch.arange(most, device=device) - (most - lengths)[:, None]).clamp_min(-1), len({row.length for row in rows}) == 1)
        return cls(store, [Sheet.sharing(store, range(store.layers), slots, lengths, rows)], torch.zeros_like(lengths))

    @property
    def position(self) -> Int[Tensor, " b"]:
        """The next rotary position of each row (tokens seen, not entries held): that of the first layer, which sees them all."""
        return self._sheets[0].following

    def next(self, layer: int) -> Int[Tensor, " b"]:
        """The next rotary position of each row in this layer."""
        return self._sheet(layer).following

    def turn(self, following: Int[Tensor, " b"]) -> None:
        """Say where the next word of each row stands on the axes that heads turn along."""
        self.shift = following - self.position

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that it holds, shared ones included."""
        return sum(len(sheet.layers) * self._store.nbytes(row) for sheet in self._sheets for row in sheet.rows)

    @property
    def utilisation(self) -> float:
        """The share of its blocks' slots that hold a token; 1 where it holds no block."""
        rows = [(len(sheet.layers), row) for sheet in self._sheets for row in sheet.rows]
        page = self._store.page
        slots = sum(count * page * (len(row.columns) + len(row.aged)) for count, row in rows)
        return sum(count * (row.length + page * len(row.aged)) for count, row in rows) / slots if slots else 1.0

    @property
    def aged(self) -> int:
        """The most blocks that any row holds of what is no longer recent."""
        return max(len(row.aged) for sheet in self._sheets for row in sheet.rows)

    def columns(self, row: int, layer: int = 0) -> list[int]:
        """The columns of a row in a layer, in order."""
        return list(self._sheet(layer).rows[row].columns)

    def of_pool(self, store: Store) -> bool:
        """Whether its blocks are of this pool."""
        return self._store is store

    def fits(self, new: int) -> bool:
        """Whether the pool has room for so many more tokens of every row."""
        return all(sheet.fits(new) for sheet in self._sheets)

    def reserve(self, new: int) -> None:
        """Hold room for so many more tokens of every row; what is no longer recent moves first, as it does when they come.

        Raises PoolFullError; what was held until then is used by what comes later.
        """
        for sheet in self._sheets:
            sheet.age()
            sheet.reserve([new] * len(sheet.rows))

    def advance(self, positions: Int[Tensor, "b s"], layers: range | None = None) -> None:
        """Make room for s new tokens in these layers (or all). A position of -1 marks padding, which takes none.

        Raises InputError where the batch has another number of rows, PoolFullError where the pool has not enough blocks; the cache then
        holds the tokens that it held, of which some may have aged by then, as they would have the next time.
        """
        if positions.shape[0] != self.position.shape[0]:
            raise InputError(f"there are {positions.shape[0]}, the cache has {self.position.shape[0]}", item="rows")
        among = range(self._store.layers) if layers is None else layers
        sheets = [sheet for sheet in self._parted(among) if sheet.layers.start in among]
        arrivals: dict[int, Arrival] = {}
        for sheet in sheets:
            if id(sheet.following) not in arrivals:
                arrivals[id(sheet.following)] = Arrival.of(positions, sheet.following)
        coming = [arrivals[id(sheet.following)] for sheet in sheets]
        for sheet, arrival in zip(sheets, coming, strict=True):
            sheet.age()
            sheet.reserve(arrival.counts)
        for sheet, arrival in zip(sheets, coming, strict=True):
            sheet.fill(arrival)

    def step(self) -> tuple[tuple[Pages, Where], ...]:
        """Make room for the next token of every row, and say where all tokens lie, if all layers hold the same exact ones, in order.

        Else nothing, and nothing is done. It is `advance` by a token a row without a question to the device; the token is stored by whoever
        asks, in the place of `append`. Raises PoolFullError as `advance` does.
        """
        sheet, store = self._sheets[0], self._store
        if len(self._sheets) > 1 or not sheet.ascending or not isinstance(store, Pages):
            return ()
        arrival = Arrival.single(sheet.following)
        sheet.reserve(arrival.counts)
        sheet.fill(arrival)
        return ((store, sheet.where),)

    def append(self, layer: int, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s e"]) -> View:
        """Store one layer's keys and values of the tokens that `advance` announced; the view includes them."""
        sheet = self._sheet(layer)
        self._store.write(layer, sheet.places, *(sheet.arrival.real(x.detach().transpose(1, 2)) for x in (keys, values)))
        if sheet.slots.count == keys.shape[2]:
            # The first tokens see nothing but each other, who are side by side as they come.
            slots = sheet.slots
            return LayerView(keys.detach(), values.detach(), slots.positions, slots.valid, slots.lengths, slots.ordered)
        return self._store.view(layer, sheet.where)

    def place(self, layers: range) -> tuple[Place, ...]:
        """Where these layers' tokens lie, if all hold the same ones, each row in order; else nothing.

        Whoever asks after `advance` has announced one token a row may store it there, in the place of `append`.
        """
        sheet, store = self._sheet(layers.start), self._store
        whole = layers.stop <= sheet.layers.stop and sheet.ascending and set(sheet.arrival.counts) == {1}
        exact = store.recent if isinstance(store, RoundedPages) else store
        if not whole or not isinstance(exact, Pages):
            return ()
        head, token = exact.keys.stride(3), exact.keys.stride(2)
        pieces = [[(start * token, stop - start) for start, stop in row] for row in sheet.where.stretches]
        keys, values = ([pool[layer] for layer in layers] for pool in (exact.keys, exact.values))
        aged = store.aged(layers, sheet.where) if isinstance(store, RoundedPages) else None
        return (Place(keys, values, head, token, pieces, [slot * token for slot in sheet.places.tolist()], aged),)

    def memory(self, layers: range, new: int) -> tuple[Memory, ...]:
        """Where these layers keep the `new` tokens a row that `advance` has announced, if each row has as many, in order; else nothing.

        Also nothing where other tokens stand behind them, but those of a single row that lie side by side with them.
        """
        sheet, store = self._sheet(layers.start), self._store
        behind, stretches = sheet.slots.count - new, sheet.where.stretches
        exact = store.recent if isinstance(store, RoundedPages) and not behind else store
        apart = behind and (len(stretches) > 1 or len(stretches[0]) > 1)
        if layers.stop > sheet.layers.stop or not sheet.slots.ordered or apart or not isinstance(exact, Pages):
            return ()
        head, token = exact.keys.stride(3), exact.keys.stride(2)
        keys, values = ([pool[layer] for layer in layers] for pool in (exact.keys, exact.values))
        start = stretches[0][0][0] * token if behind else 0
        return (Memory(keys, values, (sheet.places * token).contiguous(), (0, head, token), behind, start),)

    def view(self, layer: int) -> LayerView:
        """What the layer holds, side by side: a copy."""
        view = self._store.view(layer, self._sheet(layer).where)
        return view.gathered() if isinstance(view, PagedView) else view

    def keep(self, layer: int, index: Int[Tensor, "b k"]) -> None:
        """Keep only these entries of a layer, in this (ascending) order; blocks of the others are free again."""
        (sheet,) = (sheet for sheet in self._parted(range(layer, layer + 1)) if sheet.layers.start == layer)
        left = self.view(layer).picked(index)
        keys, values = (x.transpose(1, 2).flatten(0, 1)[left.valid.flatten()] for x in (left.keys, left.values))
        sheet.keep(index)
        self._store.write(layer, sheet.places, keys, values)

    def cut(self, tokens: int) -> int:
        """Forget all but the first so many tokens of every row, or fewer where blocks have aged; how many are left.

        Of rows that hold as many tokens as each other, without padding, and that nothing was dropped from.
        """
        return min(sheet.cut(tokens) for sheet in self._sheets)

    def fork(self) -> "PagedCache":
        """A continuation that shares the blocks stored so far; this cache may go on as well, and neither sees the other's tokens."""
        return PagedCache(self._store, [sheet.fork(sheet.layers) for sheet in self._sheets], self.shift, self.promise)

    def age(self) -> None:
        """Let the store move what is no longer recent now, not when the next tokens come."""
        for sheet in self._sheets:
            sheet.age()

    def moved(self, store: RoundedPages) -> "PagedCache":
        """A copy in another store of the same kind, of a cache in fewer bits.

        Raises PoolFullError where it has not enough blocks; of these none is held then.
        """
        mine = self._store
        assert isinstance(mine, RoundedPages), "exact blocks are found again by their content"
        moved = list[Sheet]()
        try:
            for sheet in self._sheets:
                rows = store.adopt(mine, sheet.layers, [row.copy(mine.page) for row in sheet.rows])
                moved.append(sheet.moved(store, rows))
        except PoolFullError:
            for sheet in moved:
                sheet.release()
            raise
        return PagedCache(store, moved, self.shift)

    def select(self, rows: Int[Tensor, " r"]) -> "PagedCache":
        """These rows, which share their blocks with this cache."""
        following = {id(sheet.following): sheet.following[rows] for sheet in self._sheets}
        sheets = [sheet.select(rows, following[id(sheet.following)]) for sheet in self._sheets]
        return PagedCache(self._store, sheets, self.shift[rows], self.promise)

    @staticmethod
    def joined(caches: Sequence["PagedCache"]) -> "PagedCache":
        """The rows of several caches of one pool as one batch, which shares their blocks.

        Raises InputError for caches of different pools, or whose layers hold different tokens in different places.
        """
        first = caches[0]
        parts = [[sheet.layers for sheet in cache._sheets] for cache in caches]
        if any(cache._store is not first._store or part != parts[0] for cache, part in zip(caches, parts, strict=True)):
            raise InputError("they are of different pools, or thinned at different layers", item="caches")
        following: dict[tuple[int, ...], Tensor] = {}
        sheets = []
        for level, layers in enumerate(parts[0]):
            members = [cache._sheets[level] for cache in caches]
            agreeing = tuple(id(member.following) for member in members)
            if agreeing not in following:
                following[agreeing] = torch.cat([member.following for member in members])
            slots = joined([member.slots for member in members])
            rows = [row.copy(first._store.page) for member in members for row in member.rows]
            rising = all(member.ascending for member in members)
            sheets.append(Sheet.sharing(first._store, layers, slots, following[agreeing], rows, rising))
        return PagedCache(first._store, sheets, torch.cat([cache.shift for cache in caches]))

    def release(self) -> None:
        """Give all blocks back now, and hold no row any more; a cache that dies does so by itself."""
        for sheet in self._sheets:
            sheet.release()

    def _sheet(self, layer: int) -> Sheet:
        return next(sheet for sheet in self._sheets if layer in sheet.layers)

    def _parted(self, among: range) -> list[Sheet]:
        """The sheets, each of which lies wholly among these layers or wholly outside."""
        parted = list[Sheet]()
        for sheet in self._sheets:
            bounds = [bound for bound in (among.start, among.stop) if sheet.layers.start < bound < sheet.layers.stop]
            parted += sheet.parted(bounds) if bounds else [sheet]
        self._sheets = parted
        return parted
