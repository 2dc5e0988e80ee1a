"""The exact cache: one block of memory per layer, allocated ahead."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels.cpu.layer import Place
from mmsdk.kernels.cpu.prompt import Memory
from mmsdk.kv.slots import Slots, ascending, next_position, roomy
from mmsdk.kv.types import LayerView

__all__ = ["DenseCache"]


class DenseCache:
    """Keys and values [b g c d] of every layer, with c slots a row; a view is a slice of them, and a new token is written in place.

    Layers may hold different tokens: `advance` can announce new ones to some layers alone, and `keep` thins one. A full layer doubles. A
    fork shares the memory until it stores something of its own, and copies it then. What is stored carries no gradient (`NoCache` is for
    training).
    """

    def __init__(
        self, keys: list[Tensor], values: list[Tensor], slots: list[Slots], following: list[Int[Tensor, " b"]], shift: Int[Tensor, " b"]
    ) -> None:
        self._keys = keys
        self._values = values
        # Layers share one object of each kind as long as they hold the same tokens.
        self._slots = slots
        self._following = following
        self.shift = shift
        self.mass: tuple[Float[Tensor, "b p"], ...] = ()
        # Whether spare slots may be filled, and whether filled ones may be changed: not what a fork still reads.
        self._extendable = [True] * len(keys)
        self._changeable = [True] * len(keys)

    @classmethod
    def allocate(
        cls,
        layers: int,
        rows: int,
        kv_heads: int,
        head_dim: int | tuple[int, int],
        capacity: int | Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "DenseCache":
        """An empty cache with room for `capacity` tokens in each of `rows` rows; a sequence gives each layer its own.

        Two widths are those of keys and of values. Raises InputError for a size below one, but for values of no width, and where the
        capacities are not as many as the layers.
        """
        widths = (head_dim, head_dim) if isinstance(head_dim, int) else head_dim
        capacities = [capacity] * layers if isinstance(capacity, int) else list(capacity)
        sizes = {"layers": layers, "rows": rows, "kv_heads": kv_heads, "head_dim": widths[0], "capacity": min(capacities, default=0)}
        for name, size in sizes.items():
            if size < 1:
                raise InputError(f"it is {size}, it must be at least 1", item=name)
        if len(capacities) != layers:
            raise InputError(f"there are {len(capacities)} for {layers} layers", item="capacity")
        where = torch.device(device)
        # In one piece, of which a system that has large pages touches few.
        sizes_of = [[rows * kv_heads * size * width for size in capacities] for width in widths]
        pieces = [torch.empty(sum(counts), dtype=dtype, device=where).split(counts) for counts in sizes_of]
        keys, values = (
            [piece.view(rows, kv_heads, size, width) for piece, size in zip(of, capacities, strict=True)]
            for of, width in zip(pieces, widths, strict=True)
        )
        slots = {size: Slots.empty(rows, size, where) for size in capacities}
        start = torch.zeros(rows, dtype=torch.long, device=where)
        return cls(keys, values, [slots[size] for size in capacities], [start] * layers, start)

    @property
    def position(self) -> Int[Tensor, " b"]:
        """The next rotary position of each row (tokens seen, not entries held): that of the first layer, which sees them all."""
        return self._following[0]

    def next(self, layer: int) -> Int[Tensor, " b"]:
        """The next rotary position of each row in this layer."""
        return self._following[layer]

    def turn(self, following: Int[Tensor, " b"]) -> None:
        """Say where the next word of each row stands on the axes that heads turn along."""
        self.shift = following - self.position

    def weigh(self, positions: Int[Tensor, "b s"], mass: Float[Tensor, "b s"]) -> None:
        """Let the tokens at these positions count in attention as exp(mass) tokens; all others, and padding (-1), as themselves.

        Kept as `mass`: by position + 1, with a 0 in the first column, for padding, and in the last, for all that is beyond.
        """
        table = mass.new_zeros(len(mass), int(positions.max()) + 3)
        table.scatter_(1, positions + 1, mass.masked_fill(positions < 0, 0))
        self.mass = (table,)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values, shared ones included."""
        return sum(block.nbytes for block in (*self._keys, *self._values))

    def advance(self, positions: Int[Tensor, "b s"], layers: range | None = None) -> None:
        """Make room for s new tokens in these layers (or all), growing where they do not fit. A position of -1 marks padding.

        Raises InputError where the batch has another number of rows.
        """
        if positions.shape[0] != self.position.shape[0]:
            raise InputError(f"there are {positions.shape[0]}, the cache has {self.position.shape[0]}", item="rows")
        among = range(len(self._slots)) if layers is None else layers
        # Slots that other layers go on with as they are must not be filled in place.
        elsewhere = {id(slots) for layer, slots in enumerate(self._slots) if layer not in among}
        ahead: dict[int, tuple[Tensor, bool]] = {}
        filled: dict[int, Slots] = {}
        for layer in among:
            slots, before = self._slots[layer], self._following[layer]
            if id(before) not in ahead:
                ahead[id(before)] = next_position(positions, before), ascending(positions, before)
            self._following[layer], ordered = ahead[id(before)]
            if id(slots) not in filled:
                filled[id(slots)] = roomy(slots, positions.shape[1], shared=id(slots) in elsewhere)
                filled[id(slots)].fill(positions, ordered)
            self._slots[layer] = filled[id(slots)]
            self._reserve(layer)

    def append(self, layer: int, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s e"]) -> LayerView:
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

    def place(self, layers: range) -> tuple[Place, ...]:
        """Where these layers' tokens lie, if all hold the same ones, in order and without padding; else nothing.

        Whoever asks after `advance` has announced one token a row may store it there, in the place of `append`.
        """
        slots = self._slots[layers.start]
        if not slots.count or not self._alike(layers):
            return ()
        ends, count = slice(layers.start, layers.stop), slots.count
        step, head, token, _ = self._keys[layers.start].stride()
        rows = range(len(self.position))
        pieces, newest = [[(row * step, count)] for row in rows], [row * step + (count - 1) * token for row in rows]
        return (Place(self._keys[ends], self._values[ends], head, token, pieces, newest),)

    def memory(self, layers: range, new: int) -> tuple[Memory, ...]:
        """Where these layers keep the `new` tokens a row that `advance` has announced, on the same conditions."""
        ends, count = slice(layers.start, layers.stop), self._slots[layers.start].count
        if not self._alike(layers) or len({block.stride() for block in self._keys[ends]}) > 1:
            return ()
        step, head, token, _ = self._keys[layers.start].stride()
        rows, tokens = torch.arange(len(self.position)), torch.arange(count - new, count)
        places = (rows[:, None] * step + tokens * token).flatten()
        return (Memory(self._keys[ends], self._values[ends], places, (step, head, token), count - new),)

    def _alike(self, layers: range) -> bool:
        """Whether all of these layers hold the same tokens, in order and without padding."""
        slots = self._slots[layers.start]
        return slots.ordered and all(self._slots[layer] is slots for layer in layers)

    def keep(self, layer: int, index: Int[Tensor, "b k"]) -> None:
        """Keep only these entries of a layer, in this (ascending) order; the slots of the others are filled again."""
        left, kept = self.view(layer).picked(index), index.shape[1]
        if not self._changeable[layer]:
            self._own(layer, torch.empty_like(self._keys[layer]), torch.empty_like(self._values[layer]))
        self._keys[layer][:, :, :kept] = left.keys
        self._values[layer][:, :, :kept] = left.values
        self._slots[layer] = self._slots[layer].kept(index)

    def cut(self, tokens: int) -> int:
        """Forget all but the first so many tokens of every row; how many are left.

        Of rows without padding, and that nothing was dropped from.
        """
        left = {id(slots): slots.first(tokens) for slots in self._slots}
        self._slots = [left[id(slots)] for slots in self._slots]
        self._following = [torch.full_like(self.position, tokens)] * len(self._slots)
        # a fork may read on what would be written over
        self._extendable = [mine and own for mine, own in zip(self._extendable, self._changeable, strict=True)]
        return tokens

    def fork(self) -> "DenseCache":
        """A continuation that shares what is stored so far; this cache may go on as well, and neither sees the other's tokens."""
        copies = {id(slots): slots.resized(slots.capacity) for slots in self._slots}
        slots = [copies[id(slots)] for slots in self._slots]
        child = DenseCache(list(self._keys), list(self._values), slots, list(self._following), self.shift)
        child._extendable = [False] * len(self._keys)
        child._changeable = [False] * len(self._keys)
        child.mass = self.mass
        self._changeable = [False] * len(self._keys)
        return child

    def select(self, rows: Int[Tensor, " r"]) -> "DenseCache":
        """A copy of these rows."""
        copies = {id(slots): slots.select(rows) for slots in self._slots}
        following = {id(position): position[rows] for position in self._following}
        chosen = DenseCache(
            [block[rows] for block in self._keys],
            [block[rows] for block in self._values],
            [copies[id(slots)] for slots in self._slots],
            [following[id(position)] for position in self._following],
            self.shift[rows],
        )
        chosen.mass = tuple(mass[rows] for mass in self.mass)
        return chosen

    def _reserve(self, layer: int) -> None:
        """Bring a layer's memory to the capacity of its slots, and to memory of its own before it is written."""
        block, capacity = self._keys[layer], self._slots[layer].capacity
        if self._extendable[layer] and block.shape[2] == capacity:
            return
        keys, values = (old.new_empty(*old.shape[:2], capacity, old.shape[3]) for old in (block, self._values[layer]))
        self._own(layer, keys, values)

    def _own(self, layer: int, keys: Tensor, values: Tensor) -> None:
        filled = min(self._keys[layer].shape[2], keys.shape[2])
        keys[:, :, :filled] = self._keys[layer][:, :, :filled]
        values[:, :, :filled] = self._values[layer][:, :, :filled]
        self._keys[layer], self._values[layer] = keys, values
        self._extendable[layer] = self._changeable[layer] = True
