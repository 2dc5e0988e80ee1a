"""What a cache holds now, as one that can only be read: a view stays as it is for as long as anyone looks at it."""

from collections.abc import Container, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kv.parts import Part
from mmsdk.kv.places import Turns
from mmsdk.kv.types import KVCache, LayerView
from mmsdk.kv.unturned import UnturnedCache

__all__ = ["ReadCache"]


class ReadCache:
    """A `KVCache` that stores nothing, such as stands before every action head of ours. Forks share it, for it never changes.

    Whoever wants to store something behind the same entries takes an `UnturnedCache`.
    """

    def __init__(self, views: Sequence[LayerView]) -> None:
        self._views = tuple(views)

    @staticmethod
    def at(cache: KVCache, layers: int) -> "ReadCache":
        """All that a cache holds now; one that writes where something stands already, as a thinned `DenseCache`, is to be forked first."""
        return ReadCache([cache.view(layer) for layer in range(layers)])

    @staticmethod
    def of(parts: Sequence[Part], turns: Turns, local: Container[int] = ()) -> "ReadCache":
        """These parts of blocks, at least one, side by side and at positions without gaps. Gradients pass through it to the blocks."""
        return ReadCache.at(UnturnedCache.behind(parts, turns, local), len(parts[0].block.keys))

    @property
    def position(self) -> Int[Tensor, " b"]:
        """The position behind the last valid entry of each row in the first layer."""
        return self._views[0].lengths

    def next(self, layer: int) -> Int[Tensor, " b"]:
        """The same of this layer."""
        return self._views[layer].lengths

    @property
    def shift(self) -> Int[Tensor, " b"]:
        """None: entries stand one after another."""
        return torch.zeros_like(self.position)

    def turn(self, following: Int[Tensor, " b"]) -> None:
        """Raises InputError: a view is only read."""
        raise _only_read()

    def advance(self, positions: Int[Tensor, "b s"], layers: range | None = None) -> None:
        """Raises InputError: a view is only read."""
        raise _only_read()

    def append(self, layer: int, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"]) -> LayerView:
        """Raises InputError: a view is only read."""
        raise _only_read()

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
        """These rows. Layers that hold the same entries go on sharing what tells them."""
        shared = {id(view.positions): (view.positions[rows], view.valid[rows], view.lengths[rows]) for view in self._views}
        return ReadCache([LayerView(view.keys[rows], view.values[rows], *shared[id(view.positions)], view.ordered) for view in self._views])


def _only_read() -> InputError:
    return InputError("it is only read; go on behind its parts with an UnturnedCache", item="ReadCache")
