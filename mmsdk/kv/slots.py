"""Which token stands in which slot of a cache, told apart from the keys and values, so that layers can share it."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Slots", "ascending", "closed_up", "joined", "next_position", "placed", "positions_of", "roomy"]


def ascending(positions: Int[Tensor, "b s"], after: Int[Tensor, " b"], asking: bool = False) -> bool:
    """Whether every row's new positions ascend and begin at or after `after`, so that no token is padding and none sees a later one.

    The answer is fetched from the device, which is worth a wait for a prompt and not for a single token: on a GPU those say False, but
    where the caller is `asking`.
    """
    if positions.shape[1] == 1 and positions.device.type != "cpu" and not asking:
        return False
    return bool(((positions[:, 0] >= after) & (positions.diff() > 0).all(1)).all())


def next_position(positions: Int[Tensor, "b s"], before: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
    """One past the largest position of each row, or `before` where all of them are padding."""
    return torch.maximum(before, positions.amax(1) + 1)


def placed(positions: Int[Tensor, "b s"], here: Int[Tensor, "_"], there: Int[Tensor, "_"]) -> Int[Tensor, "b s"]:
    """Positions of new tokens, counted where the next one is `there`, from where it is `here`; padding stays padding.

    Nothing is looked at where both are one object, which may then belong to no rows, as that of a `NoCache` that has seen none.
    """
    return positions if there is here else torch.where(positions < 0, positions, positions + (there - here)[:, None])


def closed_up(positions: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """Positions in any order as 0, 1, 2, ... in the same order, with nothing between where something went; -1 stays -1."""
    order = positions.argsort(dim=1, stable=True)
    place = (positions.gather(1, order) >= 0).cumsum(1) - 1
    return torch.zeros_like(order).scatter_(1, order, place).where(positions >= 0, -1)


def positions_of(valid: Bool[Tensor, "b s"]) -> Int[Tensor, "b s"]:
    """Positions without gaps over what is valid, cumsum(valid) - 1, and -1 at padding."""
    return torch.where(valid, valid.cumsum(1) - 1, -1)


class Slots:
    """Positions and padding of the slots in use, with spare ones behind them; `count` slots of every row are filled.

    Shorter rows have padding in between: all rows are as long, so that new tokens are one slice for the whole batch.
    """

    def __init__(self, positions: Int[Tensor, "b c"], valid: Bool[Tensor, "b c"], count: int, ordered: bool) -> None:
        self._positions = positions
        self._valid = valid
        self.count = count
        self.ordered = ordered
        self._look()

    @staticmethod
    def empty(rows: int, capacity: int, device: torch.device) -> "Slots":
        """No slot filled."""
        return Slots(
            torch.full((rows, capacity), -1, dtype=torch.long, device=device),
            torch.zeros(rows, capacity, dtype=torch.bool, device=device),
            count=0,
            ordered=True,
        )

    @property
    def capacity(self) -> int:
        """Slots, filled and spare."""
        return self._positions.shape[1]

    def fill(self, positions: Int[Tensor, "b s"], ordered: bool) -> None:
        """Fill the next s slots; there must be so many."""
        start, self.count = self.count, self.count + positions.shape[1]
        self._positions[:, start : self.count] = positions
        torch.ge(positions, 0, out=self._valid[:, start : self.count])
        self.ordered = self.ordered and ordered
        self._look()

    def resized(self, capacity: int) -> "Slots":
        """A copy with so many slots."""
        fresh = Slots.empty(self._positions.shape[0], capacity, self._positions.device)
        fresh._positions[:, : self.count] = self.positions
        fresh._valid[:, : self.count] = self.valid
        return Slots(fresh._positions, fresh._valid, self.count, self.ordered)

    def kept(self, index: Int[Tensor, "b k"]) -> "Slots":
        """Only these slots, moved to the front."""
        fresh = Slots.empty(self._positions.shape[0], self.capacity, self._positions.device)
        kept = index.shape[1]
        fresh._positions[:, :kept] = self.positions.gather(1, index)
        fresh._valid[:, :kept] = self.valid.gather(1, index)
        return Slots(fresh._positions, fresh._valid, kept, self.ordered)

    def first(self, count: int) -> "Slots":
        """The first so many, with the others to be filled again: these slots are not used any more."""
        return Slots(self._positions, self._valid, count, self.ordered)

    def select(self, rows: Int[Tensor, " r"]) -> "Slots":
        """A copy of these rows."""
        return Slots(self._positions[rows], self._valid[rows], self.count, self.ordered)

    def _look(self) -> None:
        # The same objects until the next change: whoever builds something from them can tell by identity that it still holds.
        self.positions = self._positions[:, : self.count]
        self.valid = self._valid[:, : self.count]
        self.lengths = self.valid.sum(1)


def roomy(slots: Slots, new: int, shared: bool) -> Slots:
    """Slots with room for `new` more: these, or a copy where they are too few or `shared` with others that stay as they are."""
    needed = slots.count + new
    if needed > slots.capacity:
        return slots.resized(max(needed, 2 * slots.capacity))
    return slots.resized(slots.capacity) if shared else slots


def joined(parts: Sequence[Slots]) -> Slots:
    """The rows of all of them, the shorter ones padded in front; columns that are padding in every row are left out."""
    count = max(1, max(int(part.lengths.max()) for part in parts), max(part.count - _blank(part) for part in parts))
    positions = [F.pad(part.positions[:, max(0, part.count - count) :], (max(0, count - part.count), 0), value=-1) for part in parts]
    together = Slots.empty(sum(map(len, positions)), 2 * count, positions[0].device)
    together.fill(torch.cat(positions), all(part.ordered and part.count == count for part in parts))
    return together


def _blank(part: Slots) -> int:
    """How many columns in front are padding in all rows."""
    seen = part.valid.any(0)
    return int(seen.long().argmax()) if bool(seen.any()) else part.count
