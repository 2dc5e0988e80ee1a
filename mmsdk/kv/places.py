"""Where entries stand that are turned when they are read: at positions without gaps, in order, padding nowhere.

Letters as in `mmsdk.kv.types`.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.kv.slots import ascending, positions_of

__all__ = ["Places", "Turn", "Turns"]


@runtime_checkable
class Turn(Protocol):
    """The rotation to some positions: `mmsdk.decoder.rope.Rotation`."""

    def __call__(self, x: Float[Tensor, "b h s d"]) -> Float[Tensor, "b h s d"]:
        """Queries or keys, one for each position, turned."""
        ...

    def last(self, count: int) -> "Turn":
        """That to the last so many of them."""
        ...


@runtime_checkable
class Turns(Protocol):
    """What makes them: `mmsdk.decoder.transformer.Decoder.rotation`."""

    def __call__(self, positions: Int[Tensor, "b t"], dtype: torch.dtype, layer: int = -1) -> Turn:
        """The rotation to these positions, of a layer where layers differ."""
        ...


class Places:
    """Which entries are real, where they stand, and the rotation to there; layers that hold the same entries share one.

    `ordered` as in `LayerView`.
    """

    def __init__(self, valid: Bool[Tensor, "b t"], ordered: bool) -> None:
        self.valid, self.ordered = valid, ordered
        self.positions, self.lengths = positions_of(valid), valid.sum(1)
        self._turns: dict[bool, Turn] = {}

    def turn(self, turns: Turns, dtype: torch.dtype, layer: int, local: bool) -> Turn:
        """To the positions of all entries, where `local` layers have a rotation of their own."""
        if local not in self._turns:
            self._turns[local] = turns(self.positions, dtype, layer)
        return self._turns[local]

    def onward(self, positions: Int[Tensor, "b s"]) -> "Places":
        """With new entries behind them."""
        ordered = self.ordered and ascending(positions, self.lengths)
        return Places(torch.cat((self.valid, positions >= 0), dim=1), ordered)

    def kept(self, index: Int[Tensor, "b k"]) -> "Places":
        """Of these entries alone."""
        return Places(self.valid.gather(1, index), self.ordered)

    def select(self, rows: Int[Tensor, " r"]) -> "Places":
        """Of these rows."""
        return Places(self.valid[rows], self.ordered)
