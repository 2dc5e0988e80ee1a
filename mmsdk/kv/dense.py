"""The exact cache: one block of memory per layer, allocated ahead."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kv.slots import Slots, ascending, next_position
from mmsdk.kv.types import LayerView

__all__ = ["DenseCache"]


class DenseCache:
    """Keys and values [b g c d] of every layer, with c slots a row; a view is a slice of them, and a new token is written in place.

    A full cache doubles. A fork shares the memory until it stores something of its own, and copies it then. What is stored carries no
    gradient (`NoCache` is for training).
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor], slots: list[Slots], position: Int[Tensor, " b"]) -> None:
        self._keys = keys
        self._values = values
        # Layers share one object until `keep` makes them differ.
        self._slots = slots
        self._position = position
        # Whether spare slots may be filled, and whether filled ones may be changed: not what a fork still reads.
        self._extendable = [True] * len(keys)
        self._changeable = [True] * len(keys)

    @classmethod
    def allocate(
        cls, layers: int, rows: int, kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> "DenseCache":
        """An empty cache with room for `capacity` tokens in each of `rows` rows. Raises InputError for a size below one."""
        sizes = {"layers": layers, "rows": rows, "kv_heads": kv_heads, "head_dim": head_dim, "capacity": capacity}
        for name, size in sizes.items():
            if size < 1:
                raise InputError(f"it is {size}, it must be at least 1", item=name)
        where = torch.device(device)
        shape = (rows, kv_heads, capacity, head_dim)
        keys, values = ([torch.empty(shape, dtype=dtype, device=where) for _ in range(layers)] for _ in range(2))
        slots = Slots.empty(rows, capacity, where)
        return cls(keys, values, [slots] * layers, torch.zeros(rows, dtype=torch.long, device=where))

    @property
    def position(self) -> Int[Tensor, " b"]:
        """The next rotary position of each row (tokens seen, not entries held)."""
        return self._position

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values, shared ones included."""
        return sum(block.nbytes for block in (*self._keys, *self._values))

    def advance(self, positions: Int[Tensor, "b s"]) -> None:
        """Make room for s new tokens in every layer, growing where they do not fit. A position of -1 marks padding.

        Raises InputError where the batch has another number of rows.
        """
        if positions.shape[0] != self._position.shape[0]:
            raise InputError(f"there are {positions.shape[0]}, the cache has {self._position.shape[0]}", item="rows")
        ordered = ascending(positions, self._position)
        changed: dict[int, Slots] = {}
        for layer, slots in enumerate(self._slots):
            if id(slots) not in changed:
                changed[id(slots)] = _roomy(slots, positions.shape[1])
                changed[id(slots)].fill(positions, ordered)
            self._slots[layer] = changed[id(slots)]
            self._reserve(layer)
        self._position = next_position(positions, self._position)

    def append(self, layer: int, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"]) -> LayerView:
        """Store one layer's keys and values of the tokens that `advance` announced; the view includes them."""
        end = self._slots[layer].count
        start = end - keys.shape[2]
        self._keys[layer][:, :, start:end] = keys.detach()
        self._values[layer][:, :, start:end] = values.detach()
        return self.view(layer)

    def view(self, layer: int) -> LayerView:
        """What the layer holds, without a copy; valid until the cache changes."""
        slots = self._slots[layer]
        keys, values = self._keys[layer][:, :, : slots.count], self._values[layer][:, :, : slots.count]
        return LayerView(keys, values, slots.positions, slots.valid, slots.lengths, slots.ordered)

    def keep(self, layer: int, index: Int[Tensor, "b k"]) -> None:
        """Keep only these entries of a layer, in this (ascending) order; the slots of the others are filled again."""
        view, kept = self.view(layer), index.shape[1]
        places = index[:, None, :, None].expand(-1, view.keys.shape[1], -1, view.keys.shape[3])
        keys, values = view.keys.gather(2, places), view.values.gather(2, places)
        if not self._changeable[layer]:
            self._own(layer, torch.empty_like(self._keys[layer]), torch.empty_like(self._values[layer]))
        self._keys[layer][:, :, :kept] = keys
        self._values[layer][:, :, :kept] = values
        self._slots[layer] = self._slots[layer].kept(index)

    def fork(self) -> "DenseCache":
        """A continuation that shares what is stored so far; this cache may go on as well, and neither sees the other's tokens."""
        copies = {id(slots): slots.resized(slots.capacity) for slots in self._slots}
        child = DenseCache(list(self._keys), list(self._values), [copies[id(slots)] for slots in self._slots], self._position.clone())
        child._extendable = [False] * len(self._keys)
        child._changeable = [False] * len(self._keys)
        self._changeable = [False] * len(self._keys)
        return child

    def select(self, rows: Int[Tensor, " r"]) -> "DenseCache":
        """A copy of these rows."""
        copies = {id(slots): slots.select(rows) for slots in self._slots}
        return DenseCache(
            [block[rows] for block in self._keys],
            [block[rows] for block in self._values],
            [copies[id(slots)] for slots in self._slots],
            self._position[rows],
        )

    def _reserve(self, layer: int) -> None:
        """Bring a layer's memory to the capacity of its slots, and to memory of its own before it is written."""
        block, capacity = self._keys[layer], self._slots[layer].capacity
        if self._extendable[layer] and block.shape[2] == capacity:
            return
        shape = (*block.shape[:2], capacity, block.shape[3])
        self._own(layer, block.new_empty(shape), block.new_empty(shape))

    def _own(self, layer: int, keys: Tensor, values: Tensor) -> None:
        filled = min(self._keys[layer].shape[2], keys.shape[2])
        keys[:, :, :filled] = self._keys[layer][:, :, :filled]
        values[:, :, :filled] = self._values[layer][:, :, :filled]
        self._keys[layer], self._values[layer] = keys, values
        self._extendable[layer] = self._changeable[layer] = True


def _roomy(slots: Slots, new: int) -> Slots:
    needed = slots.count + new
    return slots if needed <= slots.capacity else slots.resized(max(needed, 2 * slots.capacity))
