"""The rows of some layers of a paged cache that hold the same tokens: where each token lies, and what comes next."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kv.blocks import PoolFullError
from mmsdk.kv.pages import RowPages, Store, Where
from mmsdk.kv.slots import Slots, ascending, next_position, roomy
from mmsdk.kv.types import Fronts

__all__ = ["Arrival", "Sheet"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """New tokens [b s], padding among them. `counts` are the real ones of each row, which the host has to know to place them.

    `index` are the real ones among all b * s; nothing where all are. `ordered` and `ascending` are as in `PagedView`.
    """

    positions: Int[Tensor, "b s"]
    following: Int[Tensor, " b"]
    counts: tuple[int, ...]
    index: Int[Tensor, " n"]
    ordered: bool
    ascending: bool

    @staticmethod
    def of(positions: Int[Tensor, "b s"], before: Int[Tensor, " b"]) -> "Arrival":
        """Of rows that stand at `before`. One question to the device for the whole pass."""
        real = positions >= 0
        counts = tuple(real.sum(1).tolist())
        whole = sum(counts) == positions.numel()
        ordered = ascending(positions, before) if whole else False
        index = torch.empty(0, dtype=torch.long, device=positions.device) if whole else real.flatten().nonzero()[:, 0]
        rising = ordered or _rising(positions, before)
        return Arrival(positions, next_position(positions, before), counts, index, ordered, rising)

    @staticmethod
    def single(before: Int[Tensor, " b"]) -> "Arrival":
        """Of one token of every row, at its next position, which nobody has to ask the device about."""
        nothing = torch.empty(0, dtype=torch.long, device=before.device)
        return Arrival(before[:, None], before + 1, (1,) * len(before), nothing, ordered=True, ascending=True)

    def real(self, x: Float[Tensor, "b s g d"]) -> Float[Tensor, "n g d"]:
        """What belongs to real tokens, in order."""
        flat = x.flatten(0, 1)
        return flat[self.index] if len(self.index) else flat[: sum(self.counts)]


def _rising(positions: Int[Tensor, "b s"], before: Int[Tensor, " b"]) -> bool:
    """Whether the real positions of each row ascend from `before` on."""
    earlier = torch.cat([before[:, None] - 1, positions[:, :-1]], dim=1).cummax(1).values
    return bool(((positions > earlier) | (positions < 0)).all())


class Sheet:
    """Slots (which column of a view is which token), rows (which blocks), and the next position of each row, over a range of layers."""

    def __init__(
        self, store: Store, layers: range, slots: Slots, following: Int[Tensor, " b"], rows: Sequence[RowPages], ascending: bool = True,
        *, shared: bool = False,
    ) -> None:  # fmt: skip
        """Takes over one hold of every column of `rows` in these layers, or where these are `shared` has one of its own.

        `ascending` is as in `PagedView`.
        """
        self.layers = layers
        self.slots = slots
        self.following = following
        self.rows: list[RowPages] = []
        self.ascending = ascending
        self._store = store
        # Also where nobody says release: an error, an abandoned stream, Ctrl-C.
        self._release = weakref.finalize(self, _give, store, layers, self.rows)
        self._release.atexit = False
        for row in rows:
            if shared:
                store.hold(layers, row)
            self.rows.append(row)
        nothing = torch.empty(0, dtype=torch.long, device=following.device)
        self.arrival = Arrival(slots.positions[:, :0], following, (0,) * len(self.rows), nothing, ordered=True, ascending=True)
        self.places: Int[Tensor, " n"] = nothing
        self._locate()

    @staticmethod
    def sharing(
        store: Store, layers: range, slots: Slots, following: Int[Tensor, " b"], rows: Sequence[RowPages], ascending: bool = True
    ) -> "Sheet":
        """One that holds the blocks of these rows beside those that hold them already."""
        return Sheet(store, layers, slots, following, rows, ascending, shared=True)

    def fits(self, new: int) -> bool:
        """Whether there is room for so many more tokens of each row."""
        return self._store.fits(self.layers, self.rows, new)

    def age(self) -> None:
        """Let the store move what is no longer recent."""
        if self._store.age(self.layers, self.rows):
            self._locate()

    def reserve(self, counts: Sequence[int]) -> None:
        """Hold the blocks that so many more tokens of each row need.

        Raises PoolFullError; no token is lost, and what was taken until then is used by those that come later.
        """
        changed = False
        try:
            for row, count in zip(self.rows, counts, strict=True):
                changed |= row.reserve(self._store, self.layers, count)
        finally:
            if changed:
                self._locate()

    def fill(self, arrival: Arrival) -> None:
        """Take the new tokens in, at `places`."""
        self.arrival, self.following = arrival, arrival.following
        self.ascending = self.ascending and arrival.ascending
        self.slots = roomy(self.slots, arrival.positions.shape[1], shared=False)
        self.slots.fill(arrival.positions, arrival.ordered)
        self._place(arrival.counts)
        self._look()

    def keep(self, index: Int[Tensor, "b k"]) -> None:
        """Hold only these columns of the view; `places` are then the slots of the tokens among them, to be written anew.

        Raises PoolFullError, having changed nothing, where the blocks held until now are shared and there are no others.
        """
        counts = self.slots.valid.gather(1, index).sum(1).tolist()
        store, before = self._store, list(self.rows)
        _give(store, self.layers, before)
        self.rows[:] = [RowPages((), 0) for _ in before]
        try:
            for row, count in zip(self.rows, counts, strict=True):
                row.reserve(store, self.layers, count)
        except PoolFullError:
            # Others hold what was given back, so that nobody has written to it yet.
            _give(store, self.layers, self.rows)
            for row in before:
                store.hold(self.layers, row)
            self.rows[:] = before
            raise
        self.slots = self.slots.kept(index)
        self._place(counts)
        self._locate()

    def cut(self, tokens: int) -> int:
        """Hold only the first so many tokens of every row, or fewer where blocks have aged; how many."""
        left = min(row.cut(self._store, self.layers, tokens) for row in self.rows)
        self.slots, self.following = self.slots.first(left), torch.full_like(self.following, left)
        self._locate()
        return left

    def fork(self, layers: range) -> "Sheet":
        """Another one over these layers with the same tokens."""
        return self._other(
            layers, self.slots.resized(self.slots.capacity), self.following, [row.copy(self._store.page) for row in self.rows]
        )

    def moved(self, store: Store, rows: Sequence[RowPages]) -> "Sheet":
        """Another one with the same tokens, which these rows of another store hold already."""
        return Sheet(store, self.layers, self.slots.resized(self.slots.capacity), self.following, rows, self.ascending)

    def select(self, rows: Int[Tensor, " r"], following: Int[Tensor, " r"]) -> "Sheet":
        """Another one with these rows, any number of times."""
        return self._other(
            self.layers, self.slots.select(rows), following, [self.rows[row].copy(self._store.page) for row in rows.tolist()]
        )

    def parted(self, bounds: Sequence[int]) -> list["Sheet"]:
        """Parts of it, which begin at these layers and hold in all what it held."""
        starts = [self.layers.start, *bounds]
        parts = [self.fork(range(*ends)) for ends in zip(starts, [*bounds, self.layers.stop], strict=True)]
        self.release()
        return parts

    def release(self) -> None:
        """Give the blocks back, once."""
        self._release()
        self.rows = []

    def _other(self, layers: range, slots: Slots, following: Tensor, rows: Sequence[RowPages]) -> "Sheet":
        return Sheet.sharing(self._store, layers, slots, following, rows, self.ascending)

    def _place(self, counts: Sequence[int]) -> None:
        page, device = self._store.page, self.following.device
        if max(counts) <= 1:
            slots = [row.slot(page) for row, count in zip(self.rows, counts, strict=True) if count]
            self.places = torch.tensor(slots, dtype=torch.long, device=device)
        else:
            found = [row.slots(count, page) for row, count in zip(self.rows, counts, strict=True)]
            self.places = torch.cat(found).to(device)
        for row, count in zip(self.rows, counts, strict=True):
            row.length += count

    def _locate(self) -> None:
        """The table of the blocks of all rows, their stretches, and what has aged."""
        most, device = max(1, *(len(row.columns) for row in self.rows)), self.following.device
        padded = [row.columns + [0] * (most - len(row.columns)) for row in self.rows]
        self._table: Int[Tensor, "b most"] = torch.tensor(padded, dtype=torch.long, device=device)
        aged = [row.aged for row in self.rows]
        self._aged: Int[Tensor, " k"] = torch.tensor([column for row in aged for column in row], dtype=torch.long, device=device)
        self._aged_table, self._aged_counts = self._aged[:0, None], self._aged[:0]
        if len(self._aged):
            most = max(map(len, aged))
            self._aged_table = torch.tensor([row + [0] * (most - len(row)) for row in aged], device=device)
            self._aged_counts = torch.tensor([len(row) for row in aged], device=device)
        self._look()

    def _look(self) -> None:
        """Where everything lies, one object until the next change: layers share what is worked out from it."""
        slots, rows, page = self.slots, self.rows, self._store.page
        stretches, fronts = tuple(row.stretches(page) for row in rows), Fronts(self._table, tuple(row.length for row in rows), page)
        seen = slots.positions, slots.valid, slots.lengths, slots.ordered, self.ascending
        self.where = Where(tuple(rows), self._table, stretches, fronts, self._aged, self._aged_table, self._aged_counts, *seen)


def _give(store: Store, layers: range, rows: Sequence[RowPages]) -> None:
    for row in rows:
        store.give(layers, row)
