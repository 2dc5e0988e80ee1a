"""What the decoder remembers: the cache of keys and values, and the policies that thin it.

Letters: b rows of the batch, g key-value heads, s new tokens, t cached tokens, d head width.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["KVCache", "KVPolicy", "LayerView"]


@dataclass(frozen=True, slots=True)
class LayerView:
    """What one layer may attend to. Rows shorter than t are filled at the front or the back; `lengths` and `valid` tell which.

    `positions` are the rotary positions each entry was stored with, so that causality can be decided per entry. `ordered` says that every
    entry is real and each row's positions ascend; it is a fact the host knows, not a tensor, and False only means that nobody looked.
    """

    keys: Float[Tensor, "b g t d"]
    values: Float[Tensor, "b g t d"]
    positions: Int[Tensor, "b t"]
    valid: Bool[Tensor, "b t"]
    lengths: Int[Tensor, " b"]
    ordered: bool = False


@runtime_checkable
class KVCache(Protocol):
    """Keys and values of every layer, with true lengths per layer and row."""

    @property
    def position(self) -> Int[Tensor, " b"]:
        """The next rotary position of each row (tokens seen, not entries held)."""
        ...

    def next(self, layer: int) -> Int[Tensor, " b"]:
        """The next rotary position of each row in this layer: `position`, or less where tokens were dropped and the rest closed up.

        Layers that agree give the same object, so that whoever computes something from it can tell by identity that it still holds.
        """
        ...

    def advance(self, positions: Int[Tensor, "b s"], layers: range | None = None) -> None:
        """Make room for s new tokens in these layers (or all), once per pass and before its appends. A position of -1 marks padding."""
        ...

    def append(self, layer: int, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"]) -> LayerView:
        """Store the new tokens of one layer, those that `advance` announced, and return what it may now attend to."""
        ...

    def view(self, layer: int) -> LayerView:
        """What a layer may attend to now; nothing is copied."""
        ...

    def keep(self, layer: int, index: Int[Tensor, "b k"]) -> None:
        """Keep only these entries of a layer (indices into its view, ascending); really frees or reuses the space."""
        ...

    def fork(self) -> "KVCache":
        """A continuation that shares what is stored so far and never writes into it."""
        ...

    def select(self, rows: Int[Tensor, " r"]) -> "KVCache":
        """These rows (dropped, reordered or repeated) as a cache of their own: writing to one never shows in the other."""
        ...


@runtime_checkable
class KVPolicy(Protocol):
    """Reads a layer's view and says which entries stay; never touches the cache itself."""

    def __call__(self, layer: int, view: LayerView, query: Float[Tensor, "b h s d"]) -> Int[Tensor, "b k"]:
        """Indices into the view, ascending, of the k entries that each row keeps."""
        ...
