"""A few tokens behind a cache that stays as it is, with their gradients."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kv.slots import next_position
from mmsdk.kv.types import KVCache, LayerView

__all__ = ["Branch"]


class Branch:
    """A cache that goes on behind another: what the base holds is only read, and what is appended keeps its gradient.

    `DenseCache.fork()` continues a cache too, but stores without gradients, and a projection whose token is prefilled has to be trained.
    """

    def __init__(self, base: KVCache, layers: int) -> None:
        self._base = base
        self._layers = layers
        self._position = base.position
        self.shift = base.shift
        self._new: Int[Tensor, "b s"] = base.position[:, None][:, :0]
        self._after: dict[int, Int[Tensor, " b"]] = {}
        self._views: dict[int, LayerView] = {}

    @property
    def position(self) -> Int[Tensor, " b"]:
        """The next rotary position of each row (tokens seen)."""
        return self._position

    def next(self, layer: int) -> Int[Tensor, " b"]:
        """The next rotary position of each row in this layer."""
        return self._after[layer] if layer in self._after else self._base.next(layer)

    def turn(self, following: Int[Tensor, " b"]) -> None:
        """Say where the next word of each row stands on the axes that heads turn along."""
        self.shift = following - self.position

    def advance(self, positions: Int[Tensor, "b s"], layers: range | None = None) -> None:
        """Announce new tokens of these layers (or all). A position of -1 marks padding."""
        among = range(self._layers) if layers is None else layers
        after = next_position(positions, self._position if among.start == 0 else self.next(among.start))
        if among.start == 0:
            self._position = after
        self._after.update(dict.fromkeys(among, after))
        self._new = positions

    def append(self, layer: int, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"]) -> LayerView:
        """What the layer holds, and these behind it."""
        view, valid = self.view(layer), self._new >= 0
        self._views[layer] = LayerView(
            torch.cat((view.keys, keys), dim=2),
            torch.cat((view.values, values), dim=2),
            torch.cat((view.positions, self._new), dim=1),
            torch.cat((view.valid, valid), dim=1),
            view.lengths + valid.sum(1),
        )
        return self._views[layer]

    def view(self, layer: int) -> LayerView:
        """What the layer holds: the base's view until something is appended."""
        return self._views[layer] if layer in self._views else self._base.view(layer)

    def keep(self, layer: int, index: Int[Tensor, "b k"]) -> None:
        """Raises InputError: thin the base before branching off it."""
        raise InputError("it only adds to its base; thin that first", item="Branch")

    def fork(self) -> "Branch":
        """A branch of this one."""
        return Branch(self, self._layers)

    def select(self, rows: Int[Tensor, " r"]) -> "Branch":
        """These rows of base and branch."""
        chosen = Branch(self._base.select(rows), self._layers)
        chosen._position, chosen._new = self._position[rows], self._new[rows]
        chosen._after = {layer: after[rows] for layer, after in self._after.items()}
        for layer, view in self._views.items():
            parts = view.keys[rows], view.values[rows], view.positions[rows], view.valid[rows], view.lengths[rows]
            chosen._views[layer] = LayerView(*parts)
        return chosen
