"""No memory: every pass sees its own tokens alone."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kv.slots import ascending, next_position
from mmsdk.kv.types import LayerView

__all__ = ["NoCache"]


class NoCache:
    """A cache that stores nothing and hands back what it is given, gradients included: for training and for whole sequences at once."""

    def __init__(self) -> None:
        self._positions: Int[Tensor, "b s"] = torch.empty(0, 0, dtype=torch.long)
        self._valid: Bool[Tensor, "b s"] = torch.empty(0, 0, dtype=torch.bool)
        self._lengths: Int[Tensor, " b"] = torch.empty(0, dtype=torch.long)
        self._position = self._lengths
        self._ordered = True

    @property
    def position(self) -> Int[Tensor, " b"]:
        """One past the last position of each row of the last pass."""
        return self._position

    def next(self, layer: int) -> Int[Tensor, " b"]:
        """The same for every layer."""
        return self._position

    @property
    def shift(self) -> Int[Tensor, "_"]:
        """None: a pass along several axes is given the places on all of them."""
        return self._position.new_zeros(1)

    def turn(self, following: Int[Tensor, " b"]) -> None:
        """Nothing comes after the last pass."""

    def advance(self, positions: Int[Tensor, "b s"], layers: range | None = None) -> None:
        """Begin a pass, or the part of it that these layers see; nothing of an earlier one is left. A position of -1 marks padding."""
        self._positions, self._valid = positions, positions >= 0
        self._lengths = self._valid.sum(1)
        self._position = next_position(positions, torch.zeros_like(self._lengths))
        self._ordered = ascending(positions, torch.zeros_like(self._lengths))

    def append(self, layer: int, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s e"]) -> LayerView:
        """The keys and values as they came."""
        return LayerView(keys, values, self._positions, self._valid, self._lengths, self._ordered)

    def view(self, layer: int) -> LayerView:
        """Raises InputError: there is nothing to look at."""
        raise InputError("it stores nothing; use DenseCache", item="NoCache")

    def keep(self, layer: int, index: Int[Tensor, "b k"]) -> None:
        """Raises InputError: there is nothing to thin."""
        raise InputError("it stores nothing; use DenseCache", item="NoCache")

    def fork(self) -> "NoCache":
        """Another one; there is nothing to share."""
        return NoCache()

    def select(self, rows: Int[Tensor, " r"]) -> "NoCache":
        """Another one; there are no rows."""
        return NoCache()
