"""Remembered blocks as a cache that can only be read: keys are turned to compact positions when the view is made.

Published (D2-VLA, arXiv 2609.34792): at a read keys are rotated to newly assigned positions without gaps, in order; invalid slots stay
invalid; values are untouched; a view stays as it is for all steps of a flow. Being a `KVCache`, a view can stand before every action
head of ours.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.decoder.rope import Rotation
from mmsdk.errors import InputError
from mmsdk.kv.slots import positions_of
from mmsdk.kv.types import LayerView
from mmsdk.vla.memory.block import Part

__all__ = ["ReadCache", "Turning"]

# (positions [b t], dtype) -> the rotation to them: `Decoder.rotation`.
Turning = Callable[[Tensor, torch.dtype], Rotation]


class ReadCache:
    """A `KVCache` over parts of blocks, side by side. Nothing can be stored in it; forks share it, for it never changes."""

    def __init__(self, views: tuple[LayerView, ...], place: Int[Tensor, " b"]) -> None:
        self._views = views
        self._place = place

    @staticmethod
    def of(parts: Sequence[Part], turning: Turning) -> "ReadCache":
        """The view of these parts, at least one. Gradients pass through it to the blocks."""
        valid: Bool[Tensor, "b t"] = torch.cat([part.valid for part in parts], dim=1)
        positions, lengths = positions_of(valid), valid.sum(1)
        rotation = turning(positions, parts[0].block.keys.dtype)
        views = []
        for layer in range(len(parts[0].block.keys)):
            keys = rotation(torch.cat([part.keys(layer) for part in parts], dim=2))
            values = torch.cat([part.values(layer) for part in parts], dim=2)
            views.append(LayerView(keys, values, positions, valid, lengths))
        return ReadCache(tuple(views), lengths)

    @property
    def position(self) -> Int[Tensor, " b"]:
        """The position behind the last valid entry of each row."""
        return self._place

    def next(self, layer: int) -> Int[Tensor, " b"]:
        """The same for every layer."""
        return self._place

    @property
    def shift(self) -> Int[Tensor, " b"]:
        """None: entries stand one after another."""
        return torch.zeros_like(self._place)

    def turn(self, following: Int[Tensor, " b"]) -> None:
        """Raises InputError: a view is only read."""
        raise InputError("it is only read; go on behind it with a Branch", item="ReadCache")

    def advance(self, positions: Int[Tensor, "b s"], layers: range | None = None) -> None:
        """Raises InputError: a view is only read."""
        raise InputError("it is only read; go on behind it with a Branch", item="ReadCache")

    def append(self, layer: int, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"]) -> LayerView:
        """Raises InputError: a view is only read."""
        raise InputError("it is only read; go on behind it with a Branch", item="ReadCache")

    def view(self, layer: int) -> LayerView:
        """What a layer may attend to."""
        return self._views[layer]

    def keep(self, layer: int, index: Int[Tensor, "b k"]) -> None:
        """Raises InputError: a view is only read."""
        raise InputError("it is only read; select when it is made", item="ReadCache")

    def fork(self) -> "ReadCache":
        """This very view."""
        return self

    def select(self, rows: Int[Tensor, " r"]) -> "ReadCache":
        """These rows."""
        first = self._views[0]
        shared = first.positions[rows], first.valid[rows], first.lengths[rows]
        return ReadCache(tuple(LayerView(view.keys[rows], view.values[rows], *shared) for view in self._views), self._place[rows])
