"""A cache over the same places as an earlier pass, of which some are computed anew and the others stay as they were.

    cache.renew(places)                                         # which places the next layer's new tokens take
    x, _ = decoder.run(x, positions, cache, range(layer, layer + 1), mask)

For prompts that are read again and again, and change in part: what a camera saw a moment ago (`mmsdk.vla.still`). It holds as many
tokens as it was made for, whatever happens; a token keeps its place and so its position, for keys are stored turned. Views that were given
out stay as they are.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kv.slots import positions_of
from mmsdk.kv.types import LayerView

__all__ = ["RenewedCache"]

# Looks on while a layer attends: (its number, its new tokens' queries, its view).
Look = Callable[[int, Tensor, LayerView], None]


@runtime_checkable
class Attends(Protocol):
    """What is asked of a decoder: of `mmsdk.kv.policy.Ask` the attention alone."""

    def attend(self, query: Float[Tensor, "b h s d"], view: LayerView) -> Float[Tensor, "b h s d"]:
        """Exact attention of queries to a view."""
        ...


class RenewedCache:
    """Implements `mmsdk.kv.types.KVCache` for passes layer by layer. `entries` are every layer's keys and values so far."""

    def __init__(
        self, valid: Bool[Tensor, "b t"], entries: Sequence[tuple[Float[Tensor, "b g t d"], Float[Tensor, "b g t e"]]], look: Look
    ) -> None:
        self._positions, self._valid, self._lengths = positions_of(valid), valid, valid.sum(1)
        self._entries, self._look = list(entries), look
        self._places = torch.arange(valid.shape[1], device=valid.device)

    @staticmethod
    def empty(valid: Bool[Tensor, "b t"], layers: int, kv_heads: int, width: int, like: Float[Tensor, "*s"], look: Look) -> "RenewedCache":
        """Nothing was read yet: the first pass is to take all places. `like` tells dtype and device."""
        nothing = like.new_zeros(len(valid), kv_heads, valid.shape[1], width)
        return RenewedCache(valid, [(nothing, nothing)] * layers, look)

    @property
    def entries(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Keys and values of every layer, as they are now."""
        return tuple(self._entries)

    @property
    def position(self) -> Int[Tensor, " b"]:
        """The position behind the last valid token of each row."""
        return self._lengths

    def next(self, layer: int) -> Int[Tensor, " b"]:
        """The same, in every layer."""
        return self._lengths

    @property
    def shift(self) -> Int[Tensor, " b"]:
        """None: tokens stand one after another."""
        return torch.zeros_like(self._lengths)

    def turn(self, following: Int[Tensor, " b"]) -> None:
        """Raises InputError: nothing goes behind it."""
        raise _full()

    def renew(self, places: Int[Tensor, " s"]) -> None:
        """Say which places the next new tokens take, ascending, the same of all rows."""
        self._places = places

    def advance(self, positions: Int[Tensor, "b s"], layers: range | None = None) -> None:
        """Raises InputError for more or fewer tokens than places were named."""
        if positions.shape[1] != len(self._places):
            raise InputError(f"{positions.shape[1]} new tokens for {len(self._places)} places", item="RenewedCache")

    def append(self, layer: int, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s e"]) -> LayerView:
        """Put a layer's new tokens at their places, and look at all that it holds."""
        before = self._entries[layer]
        self._entries[layer] = before[0].index_copy(2, self._places, keys), before[1].index_copy(2, self._places, values)
        return self.view(layer)

    def attend(
        self, layer: int, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s e"], ask: Attends
    ) -> Float[Tensor, "b h s e"]:
        """The same, and what the new tokens get."""
        view = self.append(layer, keys, values)
        self._look(layer, query, view)
        return ask.attend(query, view)

    def view(self, layer: int) -> LayerView:
        """What the layer holds."""
        return LayerView(*self._entries[layer], self._positions, self._valid, self._lengths)

    def keep(self, layer: int, index: Int[Tensor, "b k"]) -> None:
        """Raises InputError: every token has its place."""
        raise _full()

    def fork(self) -> "RenewedCache":
        """A cache that shares what is stored so far; neither sees what the other renews."""
        return RenewedCache(self._valid, self._entries, self._look)

    def select(self, rows: Int[Tensor, " r"]) -> "RenewedCache":
        """A copy of these rows."""
        return RenewedCache(self._valid[rows], [(keys[rows], values[rows]) for keys, values in self._entries], self._look)


def _full() -> InputError:
    return InputError("its tokens have their places for good; go on behind a `Branch` or a `DenseCache`", item="RenewedCache")
