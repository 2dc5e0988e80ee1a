"""A cache whose keys are kept before their rotation (RoPE) and turned whenever they are read, to positions without gaps.

    cache = UnturnedCache.behind(parts, decoder.rotation)        # what a reader takes of earlier blocks, side by side
    hidden = decoder(embeddings, positions, cache, mask)         # an ordinary pass behind them; positions go on from `cache.position`
    block = cache.block(embeddings.shape[1])                     # what it left, to be read again elsewhere, by others, in other parts
    view = ReadCache.at(cache, config.layers)                    # all of it as it stands now (`mmsdk.kv.read`), for who stores nothing

An ordinary cache holds keys that are turned already: whatever goes leaves a gap, and whoever wants to read entries at other positions has
to move them on from where they stand (`mmsdk.kv.turning`). Here every reading begins at what was stored, so that nothing is rounded twice,
and readers that select differently share one store. Published: D2-VLA, arXiv 2609.34792, whose policies read this way
(`mmsdk.vla.memory`): in order, without gaps, invalid slots stay invalid, values are untouched. The price is that all that is read is
turned, and copied, in every pass.

Letters as in `mmsdk.kv.types`; l layers, k entries kept.
"""

from collections.abc import Callable, Container, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kv.parts import Block, Part
from mmsdk.kv.places import Places, Turn, Turns
from mmsdk.kv.types import LayerView, taken

__all__ = ["Look", "UnturnedCache", "unseen"]

# Looks on while a layer attends: (its number, its new tokens' queries as they are turned, its view with these tokens at its end).
Look = Callable[[int, Tensor, LayerView], None]


@runtime_checkable
class Attends(Protocol):
    """What is asked of a decoder: of `mmsdk.kv.policy.Ask` the attention alone."""

    def attend(self, query: Float[Tensor, "b h s d"], view: LayerView) -> Float[Tensor, "b h s d"]:
        """Exact attention of turned queries to a view."""
        ...


def unseen(layer: int, query: Tensor, view: LayerView) -> None:
    """Nobody looks on."""


class UnturnedCache:
    """Implements `mmsdk.kv.types.KVCache`. Gradients pass through it to whatever was stored.

    The decoder hands it queries and keys before their rotation and attends through it; decoders of latents do not go with it. Along several
    axes (M-RoPE) an entry stands on all of them alike. Positions of new tokens go on from `position`, which counts what is held: what was
    dropped left no gap. What is stored is never written over, so that forks and parts of blocks share it. `look` looks on.
    """

    def __init__(self, turns: Turns, local: Container[int], places: Sequence[Places], look: Look = unseen) -> None:
        """No entries yet in any layer, though `places` may announce some. `local` are the layers with a rotation of their own."""
        self._turns, self._local, self._look = turns, local, look
        self._places = list(places)
        self._keys: list[tuple[Tensor, ...]] = [()] * len(self._places)
        self._values = list(self._keys)
        self._views: list[tuple[LayerView, ...]] = [()] * len(self._places)

    @staticmethod
    def empty(
        layers: int, rows: int, device: torch.device | str, turns: Turns, local: Container[int] = (), look: Look = unseen
    ) -> "UnturnedCache":
        """Nothing is remembered."""
        nothing = torch.zeros(rows, 0, dtype=torch.bool, device=device)
        return UnturnedCache(turns, local, [Places(nothing, ordered=True)] * layers, look)

    @staticmethod
    def behind(parts: Sequence[Part], turns: Turns, local: Container[int] = (), look: Look = unseen) -> "UnturnedCache":
        """What stands behind these parts of blocks, side by side; there is at least one. They are not copied before they are read."""
        layers = range(len(parts[0].block.keys))
        places = Places(torch.cat([part.valid for part in parts], dim=1), ordered=False)
        cache = UnturnedCache(turns, local, [places] * len(layers), look)
        cache._keys = [tuple(part.keys(layer) for part in parts) for layer in layers]
        cache._values = [tuple(part.values(layer) for part in parts) for layer in layers]
        return cache

    @property
    def position(self) -> Int[Tensor, " b"]:
        """The position behind the last valid entry of each row in the first layer."""
        return self._places[0].lengths

    def next(self, layer: int) -> Int[Tensor, " b"]:
        """The same of this layer."""
        return self._places[layer].lengths

    @property
    def shift(self) -> Int[Tensor, " b"]:
        """None: entries stand one after another."""
        return torch.zeros_like(self.position)

    def turn(self, following: Int[Tensor, " b"]) -> None:
        """Nothing: entries stand on all axes alike."""

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored, the parts of blocks that it stands behind included."""
        return sum(x.nbytes for held in (*self._keys, *self._values) for x in held)

    def advance(self, positions: Int[Tensor, "b s"], layers: range | None = None) -> None:
        """Announce s new tokens to these layers (or all). A position of -1 marks padding.

        Raises InputError where the batch has another number of rows.
        """
        if positions.shape[0] != self.position.shape[0]:
            raise InputError(f"there are {positions.shape[0]}, the cache has {self.position.shape[0]}", item="rows")
        ahead: dict[int, Places] = {}
        for layer in range(len(self._places)) if layers is None else layers:
            before = self._places[layer]
            if id(before) not in ahead:
                ahead[id(before)] = before.onward(positions)
            self._places[layer], self._views[layer] = ahead[id(before)], ()

    def append(self, layer: int, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"]) -> LayerView:
        """Store a layer's new tokens, those that `advance` announced, and look at all that it holds. The keys are not turned yet."""
        self._keys[layer] = (*self._keys[layer], keys)
        self._values[layer] = (*self._values[layer], values)
        return self.view(layer)

    def attend(
        self, layer: int, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"], ask: Attends
    ) -> Float[Tensor, "b h s d"]:
        """Store a layer's new tokens, and what they get from all that it then holds; queries and keys are not turned yet."""
        view = self.append(layer, keys, values)
        turned = self._turn(layer, query.dtype).last(query.shape[2])(query)
        self._look(layer, turned, view)
        return ask.attend(turned, view)

    def view(self, layer: int) -> LayerView:
        """What the layer holds, its keys turned to where they stand now. Raises InputError where nothing was read yet."""
        if not self._keys[layer]:
            raise InputError("nothing was read yet; let a decoder read something first", item="UnturnedCache")
        if self._views[layer]:
            return self._views[layer][0]
        places = self._places[layer]
        keys, values = (x[layer][0] if len(x[layer]) == 1 else torch.cat(x[layer], dim=2) for x in (self._keys, self._values))
        turned = self._turn(layer, keys.dtype)(keys)
        self._keys[layer], self._values[layer] = (keys,), (values,)
        self._views[layer] = (LayerView(turned, values, places.positions, places.valid, places.lengths, places.ordered),)
        return self._views[layer][0]

    def block(self, slots: int, time: float = 0.0) -> Block:
        """The last so many entries of every layer, which hold the same tokens there: a copy, and the only one that is needed to go on."""
        assert all(places is self._places[0] for places in self._places), "a block is what one pass left in all layers"
        keys, values = (torch.stack([held[-1][:, :, -slots:] for held in x]) for x in (self._keys, self._values))
        return Block(keys, values, self._places[0].valid[:, -slots:], time)

    def keep(self, layer: int, index: Int[Tensor, "b k"]) -> None:
        """Keep only these entries of a layer's view, ascending; they close up, and the memory of others is freed."""
        self.view(layer)
        self._keys[layer], self._values[layer] = ((taken(x[layer][0], index),) for x in (self._keys, self._values))
        self._places[layer], self._views[layer] = self._places[layer].kept(index), ()

    def fork(self) -> "UnturnedCache":
        """A continuation that shares what is stored so far; neither sees the other's tokens."""
        return self._like(self._places, self._keys, self._values, self._views)

    def select(self, rows: Int[Tensor, " r"]) -> "UnturnedCache":
        """A copy of these rows."""
        places = {id(one): one.select(rows) for one in self._places}
        keys, values = ([tuple(x[rows] for x in held) for held in of] for of in (self._keys, self._values))
        return self._like([places[id(one)] for one in self._places], keys, values, [()] * len(keys))

    def _turn(self, layer: int, dtype: torch.dtype) -> Turn:
        return self._places[layer].turn(self._turns, dtype, layer, layer in self._local)

    def _like(
        self,
        places: Sequence[Places],
        keys: Sequence[tuple[Tensor, ...]],
        values: Sequence[tuple[Tensor, ...]],
        views: Sequence[tuple[LayerView, ...]],
    ) -> "UnturnedCache":
        other = UnturnedCache(self._turns, self._local, places, self._look)
        other._keys, other._values, other._views = list(keys), list(values), list(views)
        return other
