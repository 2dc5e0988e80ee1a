"""What one layer holds, entry by entry: keys, values, positions, and whatever a policy notes about them.

Rows of a batch may hold different numbers of tokens, and the heads of a layer different tokens: positions are [b q t] with q = 1 as long
as all heads hold the same, and then g. Shorter rows are padded in front, by a position of -1; real entries ascend.

Letters: b rows, g key-value heads, s new tokens, t entries held, k entries kept, d width of a key, e of a value, q is 1 or g.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from mmsdk.kv.slots import ascending
from mmsdk.kv.turning import Turning
from mmsdk.kv.types import LayerView

__all__ = ["Arriving", "Entries"]

# Spare slots behind those in use when memory is allocated anew: at least so many, and a part of what is held.
_SPARE, _PART = 4, 16
_STILL = Turning(torch.empty(0), 1.0, growing=False)


@dataclass(frozen=True, slots=True)
class Arriving:
    """New tokens, as all layers that they come to share them. `ordered` as in `LayerView`."""

    positions: Int[Tensor, "b s"]
    valid: Bool[Tensor, "b s"]
    lengths: Int[Tensor, " b"]
    ordered: bool

    @staticmethod
    def of(positions: Int[Tensor, "b s"], before: Int[Tensor, " b"]) -> "Arriving":
        """Of rows that stand at `before`. The device is asked once for the whole pass, also about a single token: not knowing whether it is
        padding, every layer that lets go of something would have to ask how much it holds."""
        valid = positions >= 0
        return Arriving(positions, valid, valid.sum(1), ascending(positions, before, asking=True))

    def row(self, place: int) -> "Arriving":
        """Those of one row."""
        here = slice(place, place + 1)
        return Arriving(self.positions[here], self.valid[here], self.lengths[here], self.ordered)


class Entries:
    """The entries of layer `layer` of `depth`.

    `columns` are what a policy notes of every entry, [b q t ...]: they go where entries go, and are 0 for new ones. `notes` are what it
    notes of every row, [b ...]. Tensors in both are replaced, never changed. `memo` is for what was worked out from the entries: it holds
    as long as others are only added behind them, and is emptied when any go or move. `read` are the pairs of a key and a value that the
    last pass read, over rows and heads. `whole` says that no entry is padding, which a host knows.
    """

    def __init__(self, layer: int, depth: int) -> None:
        self.layer, self.depth = layer, depth
        self.count = self.read = 0
        self.whole = True
        self.turning = _STILL
        self.columns: dict[str, Tensor] = {}
        self.notes: dict[str, Tensor] = {}
        self.memo: dict[str, object] = {}
        self._keys = self._values = torch.empty(0, 0, 0, 0)
        self._positions = torch.empty(0, 1, 0, dtype=torch.long)
        # The tokens of the only pass so far, which are the same object in every layer.
        self._first: tuple[Arriving, ...] = ()
        # slots in front of those in use: entries that moved up behind one that went left them
        self._begin = 0
        # whether slots behind may be filled, and whether nobody else looks at those in use, so that entries may move there
        self._extendable = self._own = True

    @property
    def keys(self) -> Float[Tensor, "b g t d"]:
        """Turned to their positions."""
        return self._keys[:, :, self._used]

    @property
    def values(self) -> Float[Tensor, "b g t e"]:
        """As they came."""
        return self._values[:, :, self._used]

    @property
    def positions(self) -> Int[Tensor, "b q t"]:
        """Counted in tokens, -1 for padding."""
        return self._positions[:, :, self._used]

    @property
    def valid(self) -> Bool[Tensor, "b q t"]:
        """Which are real."""
        return self.positions >= 0

    @property
    def lengths(self) -> Int[Tensor, "b q"]:
        """How many are real."""
        return self.valid.sum(-1)

    @property
    def order(self) -> Int[Tensor, "b q t"]:
        """The place of every entry among the real ones of its row and head, from 0; below 0 for padding in front."""
        if self.whole:
            return torch.arange(self.count, device=self._positions.device).expand_as(self.positions)
        valid = self.valid
        return (valid.cumsum(-1) - 1).masked_fill(~valid, -1)

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is allocated."""
        noted = sum(x.nbytes for x in (*self.columns.values(), *self.notes.values(), *self.memo.values()) if isinstance(x, Tensor))
        return self._keys.nbytes + self._values.nbytes + self._positions.nbytes + noted

    @property
    def span(self) -> int:
        """Slots that are allocated, over rows and heads."""
        b, g, slots, _ = self._keys.shape
        return b * g * slots

    def append(self, new: Arriving, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s e"]) -> None:
        """Store new tokens behind those that are there."""
        start, self.count = self.count, self.count + keys.shape[2]
        if self._begin + self.count > self._keys.shape[2] or not self._extendable:
            self._grow(start, keys, values)
        here = slice(self._begin + start, self._begin + self.count)
        self._keys[:, :, here], self._values[:, :, here] = keys.detach(), values.detach()
        self._positions[:, :, here] = new.positions[:, None]
        self.columns = {name: _longer(x, keys.shape[2]) for name, x in self.columns.items()}
        self.whole = self.whole and new.ordered
        self._first = () if start else (new,)

    def keep(self, index: Int[Tensor, "b q k"], whole: bool, room: int = 0) -> None:
        """Keep these columns of every row and head, ascending behind padding of -1, with room for more; the memory of others is freed.

        `whole` says that there is no padding among them.
        """
        # spare slots take some entry or other along, which saves laying all of it out twice
        wide = F.pad(index, (0, room), value=-1)
        there, self.columns = wide.clamp_min(0), {name: _along(x, index.clamp_min(0)) for name, x in self.columns.items()}
        self._keys, self._values = (_picked(pool, there + self._begin) for pool in (self._keys, self._values))
        self._positions = _along(self.positions, there).masked_fill(wide < 0, -1)
        self.count, self.whole, self._begin = index.shape[2], whole, 0
        self._first, self._extendable, self._own = (), True, True
        self.memo = {}

    def drop(self, index: Int[Tensor, "b q k"], room: int = 0) -> None:
        """Keep all columns of every row and head but one, where none is padding: `keep`, without laying out anew what stays.

        What stands in front of the one that goes moves up by a slot. Only memory that nobody else looks at can be changed so, and only on a
        processor does it pay to ask where the gaps are.
        """
        heads, by_head = self._positions.shape[1], index.shape[1]
        if not self._own or by_head > heads or self._keys.device.type != "cpu":
            self.keep(index, True, room)
            return
        gaps = (index == torch.arange(index.shape[2], device=index.device)).sum(-1).tolist()
        self.columns = {name: _along(x, index) for name, x in self.columns.items()}
        for pool in (self._keys, self._values, self._positions):
            for row, places in zip(pool, gaps, strict=True):
                for part, place in zip(row.split(1) if by_head > 1 else (row,), places, strict=True):
                    _moved_up(part, self._begin, place)
        self._begin, self.count = self._begin + 1, self.count - 1
        self._first, self.memo = (), {}

    def close_up(self, ahead: Int[Tensor, " b"]) -> None:
        """Move what is held to the positions 0, 1, 2, ... of every row and head, and its keys with it; notes of rows are dropped.

        Keys must turn by frequencies that do not follow how far a row reaches. Along several axes all of them move by one shift, which is
        right where nothing is missing between the entries: the word behind them stands `ahead` of its position, and then at its position.
        """
        self.place(self.order.clamp_min(-1), ahead)

    def place(self, positions: Int[Tensor, "b q t"], ahead: Int[Tensor, " b"]) -> None:
        """The same to any positions that ascend, -1 for padding; in memory of its own."""
        by = (positions - self.positions - ahead[:, None, None]).masked_fill(positions < 0, 0)
        # replaced, not changed: a fork may look at them
        self._keys, self._values = self.turning.further(self.keys, by), self.values
        self._positions = positions
        self._first, self._extendable, self._own, self._begin = (), False, False, 0
        self.notes, self.memo = {}, {}

    def lie(self, keys: Float[Tensor, "b g c d"], values: Float[Tensor, "b g c e"], positions: Int[Tensor, "b 1 c"], begin: int) -> None:
        """Look at the same entries where somebody else keeps them, from this slot on, and puts new ones behind them (`told`)."""
        self._keys, self._values, self._positions, self._begin = keys, values, positions, begin
        self._first, self._extendable, self._own = (), False, False

    def told(self, count: int, whole: bool) -> None:
        """So many more lie behind those that were there; `whole` says that none of them is padding."""
        self.count, self.whole = self.count + count, self.whole and whole

    def forget(self) -> None:
        """Drop what was noted."""
        self.columns, self.notes, self.memo = {}, {}, {}

    def rows(self) -> LayerView:
        """All of it as an attention may look at it: a row for each of the batch, or for each head where they hold different tokens."""
        if self._first:
            (new,) = self._first
            return LayerView(self.keys, self.values, new.positions, new.valid, new.lengths, new.ordered)
        return self.view() if self._positions.shape[1] == 1 else self.heads()

    def heads(self) -> LayerView:
        """The same with every head as a row, whatever they hold: n = b * g, one key-value head."""
        keys, values = (x.flatten(0, 1).unsqueeze(1) for x in (self.keys, self.values))
        positions = self.positions.expand(-1, self._keys.shape[1], -1).reshape(-1, self.count)
        return _viewed(keys, values, positions, self.whole)

    def view(self) -> LayerView:
        """A row for each of the batch; where heads hold different tokens, an entry has the latest position among them."""
        positions = self.positions[:, 0] if self._positions.shape[1] == 1 else self.positions.amax(1)
        return _viewed(self.keys, self.values, positions, self.whole)

    def select(self, rows: Int[Tensor, " r"]) -> "Entries":
        """A copy of these rows, without columns that are padding in all of them."""
        here = slice(self._blank(rows), None)
        other = self._like({name: x[rows][:, :, here] for name, x in self.columns.items()}, {k: x[rows] for k, x in self.notes.items()})
        other._keys, other._values, other._positions = (x[rows][:, :, here] for x in (self.keys, self.values, self.positions))
        other.count = other._keys.shape[2]
        other.turning = self.turning.select(rows)
        return other

    def fork(self) -> "Entries":
        """The same entries, whose memory is shared until either stores something of its own there."""
        other = self._like(self.columns, self.notes)
        other._keys, other._values, other._positions = self._keys, self._values, self._positions
        other._first, other._extendable, other._begin = self._first, False, self._begin
        self._own = other._own = False
        return other

    @property
    def _used(self) -> slice:
        """The slots in use."""
        return slice(self._begin, self._begin + self.count)

    def _like(self, columns: Mapping[str, Tensor], notes: Mapping[str, Tensor]) -> "Entries":
        other = Entries(self.layer, self.depth)
        other.count, other.read, other.whole, other.turning = self.count, self.read, self.whole, self.turning
        other.columns, other.notes = dict(columns), dict(notes)
        return other

    def _blank(self, rows: Int[Tensor, " r"]) -> int:
        """Leading columns that are padding in all of these rows."""
        if self.whole or not self.count:
            return 0
        seen = self.valid[rows].flatten(0, 1).any(0)
        return int(seen.long().argmax()) if bool(seen.any()) else self.count

    def _grow(self, held: int, keys: Tensor, values: Tensor) -> None:
        """Memory of its own for all that is to be held, and some to spare; the first pass gets exactly what it needs."""
        slots = self.count + max(_SPARE, self.count // _PART) if held else self.count
        fresh = [new.new_empty(*new.shape[:2], slots, new.shape[3]) for new in (keys, values)]
        positions = torch.full((keys.shape[0], self._positions.shape[1], slots), -1, dtype=torch.long, device=keys.device)
        if held:
            for new, old in zip((*fresh, positions), (self._keys, self._values, self._positions), strict=True):
                new[:, :, :held] = old[:, :, self._begin : self._begin + held]
        (self._keys, self._values), self._positions = fresh, positions
        self._extendable, self._own, self._begin = True, True, 0


def _viewed(keys: Float[Tensor, "n g t d"], values: Float[Tensor, "n g t e"], positions: Int[Tensor, "n t"], whole: bool) -> LayerView:
    valid = positions >= 0
    return LayerView(keys, values, positions, valid, valid.sum(1), whole)


def _longer(x: Tensor, count: int) -> Tensor:
    return torch.cat((x, x.new_zeros(*x.shape[:2], count, *x.shape[3:])), dim=2)


def _moved_up(x: Float[Tensor, "q c *d"] | Int[Tensor, "q c"], begin: int, count: int) -> None:
    """So many slots from `begin` on, each to the next."""
    if count:
        x[:, begin + 1 : begin + 1 + count] = x[:, begin : begin + count].clone()


def _picked(pool: Float[Tensor, "b g c d"], index: Int[Tensor, "b q k"]) -> Float[Tensor, "b g k d"]:
    """These slots of every row and head. Whole vectors are copied, which is several times as fast as numbers one by one."""
    b, g, c, d = pool.shape
    begins = c * torch.arange(b * g, device=pool.device).view(b, g, 1)
    return pool.reshape(b * g * c, d)[(begins + index).flatten()].view(b, g, index.shape[2], d)


def _along(x: Tensor, index: Int[Tensor, "b q k"]) -> Tensor:
    """The entries of a column at these places, for each head where either tells heads apart."""
    q = max(x.shape[1], index.shape[1])
    place = index.expand(-1, q, -1).reshape(*index.shape[:1], q, -1, *(1,) * (x.ndim - 3))
    return x.expand(-1, q, *x.shape[2:]).gather(2, place.expand(-1, -1, -1, *x.shape[3:]))
