"""A cache whose layers are stores of a policy: what stays, what is read and in how many bits is theirs to say.

The decoder hands it queries along with keys and values, and attends through it; see `mmsdk.decoder.transformer.SelfAttention`. Positions
go on counting the tokens that were seen, whatever has been evicted.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kv.entries import Arriving
from mmsdk.kv.policy import Ask, Closing, Hearing, LayerStore
from mmsdk.kv.slots import next_position
from mmsdk.kv.types import LayerView

__all__ = ["PolicyCache"]


class PolicyCache:
    """Implements `mmsdk.kv.types.KVCache` over one `LayerStore` for each layer. What is stored carries no gradient."""

    def __init__(self, stores: Sequence[LayerStore], following: Sequence[Int[Tensor, " b"]], shift: Int[Tensor, " b"]) -> None:
        self._stores = list(stores)
        # Layers share one object as long as they stand at the same position.
        self._following = list(following)
        self.shift = shift
        nothing = Arriving(shift.new_empty(len(shift), 0), shift.new_empty(len(shift), 0, dtype=torch.bool), shift, ordered=True)
        self._arriving = [nothing] * len(self._stores)

    @classmethod
    def empty(cls, stores: Sequence[LayerStore], rows: int, device: torch.device | str) -> "PolicyCache":
        """No token yet, in rows of these empty stores."""
        start = torch.zeros(rows, dtype=torch.long, device=device)
        return cls(stores, [start] * len(stores), start)

    @property
    def position(self) -> Int[Tensor, " b"]:
        """The next rotary position of each row: tokens seen, not entries held."""
        return self._following[0]

    def next(self, layer: int) -> Int[Tensor, " b"]:
        """The next rotary position of each row in this layer."""
        return self._following[layer]

    def turn(self, following: Int[Tensor, " b"]) -> None:
        """Say where the next word of each row stands on the axes that heads turn along."""
        self.shift = following - self.position

    @property
    def nbytes(self) -> int:
        """Bytes allocated for all layers, with everything that the policy notes."""
        return sum(store.nbytes for store in self._stores)

    @property
    def span(self) -> int:
        """Slots for a key and a value that are allocated, over layers, rows and key-value heads."""
        return sum(store.span for store in self._stores)

    @property
    def read_bytes(self) -> int:
        """Bytes of keys and values that the last pass read in all layers."""
        return sum(store.read_bytes for store in self._stores)

    @property
    def stores(self) -> tuple[LayerStore, ...]:
        """What holds the layers."""
        return tuple(self._stores)

    def store(self, layer: int) -> LayerStore:
        """What holds a layer."""
        return self._stores[layer]

    def lengths(self, layer: int) -> Int[Tensor, "b q"]:
        """Tokens that a layer holds of each row, by each key-value head where they differ."""
        return self._stores[layer].lengths

    def advance(self, positions: Int[Tensor, "b s"], layers: range | None = None) -> None:
        """Announce s new tokens to these layers (or all). A position of -1 marks padding.

        Raises InputError where the batch has another number of rows.
        """
        if positions.shape[0] != self.position.shape[0]:
            raise InputError(f"there are {positions.shape[0]}, the cache has {self.position.shape[0]}", item="rows")
        ahead: dict[int, tuple[Tensor, Arriving]] = {}
        for layer in range(len(self._stores)) if layers is None else layers:
            before = self._following[layer]
            if id(before) not in ahead:
                ahead[id(before)] = next_position(positions, before), Arriving.of(positions, before)
            self._following[layer], self._arriving[layer] = ahead[id(before)]

    def hear(self, kinds: Int[Tensor, "b s"], layers: range | None = None) -> None:
        """Tell the stores of these layers (or all) that want to know it of what kind their next tokens are (`mmsdk.kv.policy.Hearing`)."""
        for store in self._stores if layers is None else self._stores[layers.start : layers.stop]:
            if isinstance(store, Hearing):
                store.hear(kinds)

    def attend(
        self, layer: int, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s e"], ask: Ask
    ) -> Float[Tensor, "b h s v"]:
        """Store a layer's new tokens, those that `advance` announced, and what they get from all that it then holds."""
        self._stores[layer].append(self._arriving[layer], keys, values)
        return self._stores[layer].attend(query, ask)

    def append(self, layer: int, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s e"]) -> LayerView:
        """Store a layer's new tokens and look at all that it holds: nobody asks, so that the policy sees no queries and evicts nothing."""
        self._stores[layer].append(self._arriving[layer], keys, values)
        return self._stores[layer].view()

    def view(self, layer: int) -> LayerView:
        """What the layer holds; where its heads hold different tokens, an entry has the latest position among them."""
        return self._stores[layer].view()

    def keep(self, layer: int, index: Int[Tensor, "b k"]) -> None:
        """Keep only these entries of a layer's view, ascending; the memory of others is freed."""
        self._stores[layer].keep(index)

    def rehouse(self, stores: Sequence[LayerStore]) -> None:
        """Let these stores, which hold the same, go on in the place of those that are there."""
        self._stores = list(stores)

    def settle(self) -> None:
        """A prompt has been read: from now on every layer holds no more than its budget, and what is above it goes at once."""
        for store in self._stores:
            store.settle()

    def close_up(self) -> None:
        """Let the next token follow what is held at once: positions of what went are given again (`mmsdk.kv.policy.Closing`).

        Along several axes, keys of all entries move by one shift, so that the next word stands at its position on each.
        Where a store cannot, all stay as they are, and positions go on counting.
        """
        closing = [store for store in self._stores if isinstance(store, Closing)]
        if len(closing) < len(self._stores):
            return
        # every store has to, and all say the same
        shifts = [store.close_up(self.shift) for store in closing]
        self.shift = shifts[0]
        ends = [store.view().positions.amax(1) + 1 for store in self._stores]
        # layers that stand at the same position share one object
        self._following = [next(end for end in ends if torch.equal(end, own)) for own in ends]

    def fork(self) -> "PolicyCache":
        """A continuation that shares what is stored so far; neither sees the other's tokens."""
        return PolicyCache([store.fork() for store in self._stores], self._following, self.shift)

    def select(self, rows: Int[Tensor, " r"]) -> "PolicyCache":
        """A copy of these rows."""
        following = {id(position): position[rows] for position in self._following}
        stores = [store.select(rows) for store in self._stores]
        return PolicyCache(stores, [following[id(position)] for position in self._following], self.shift[rows])
