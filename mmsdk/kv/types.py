"""What the decoder remembers: the cache of keys and values. The policies that thin it are in `mmsdk.kv.policy`.

Letters: b rows of the batch, g key-value heads, s new tokens, t cached tokens, d width of a key, e of a value. These are the same but for
attentions that store something else in their place (`mmsdk.decoder.latent`); a value may have no width at all.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.kernels.older import Older, numbers

__all__ = ["Fronts", "KVCache", "LayerView", "PagedView", "View", "taken"]


def taken(x: Float[Tensor, "b g t d"], index: Int[Tensor, "b k"]) -> Float[Tensor, "b g k d"]:
    """These entries of each row, the same of all heads: a copy."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


@dataclass(frozen=True, slots=True)
class LayerView:
    """What one layer may attend to. Rows shorter than t are filled at the front or the back; `lengths` and `valid` tell which.

    `positions` are the rotary positions each entry was stored with, so that causality can be decided per entry. `ordered` says that every
    entry is real and each row's positions ascend; it is a fact the host knows, not a tensor, and False only means that nobody looked.
    """

    keys: Float[Tensor, "b g t d"]
    values: Float[Tensor, "b g t e"]
    positions: Int[Tensor, "b t"]
    valid: Bool[Tensor, "b t"]
    lengths: Int[Tensor, " b"]
    ordered: bool = False

    def picked(self, index: Int[Tensor, "b k"]) -> "LayerView":
        """These entries of each row alone: a copy."""
        valid = self.valid.gather(1, index)
        return LayerView(taken(self.keys, index), taken(self.values, index), self.positions.gather(1, index), valid, valid.sum(1))


class Fronts:
    """The rows of pages side by side, each from the front: where every token lies, and which columns stand for none.

    Layers that hold the same tokens share one, so that it is worked out once a pass, and only where an attention asks for it.
    """

    def __init__(
        self, table: Int[Tensor, "b most"], lengths: tuple[int, ...], page: int, counts: tuple[Int[Tensor, " b"], ...] = ()
    ) -> None:
        """`counts` are the lengths where the table is, if they are there already."""
        self._table, self._page, self._counts = table, page, counts
        self.lengths = lengths

    @cached_property
    def slots(self) -> Int[Tensor, " n"]:
        """The slots of all rows, one row behind the other, each as long as the longest: behind its end a row repeats its last token."""
        # a row without tokens reads the first slot of all, and nobody sees it
        ends = self.counts.sub(1).clamp_min_(0)
        place = torch.arange(max(self.lengths), device=self._table.device).minimum(ends[:, None])
        return (self._table.gather(1, place // self._page) * self._page + place % self._page).flatten()

    @cached_property
    def bias(self) -> Float[Tensor, "b 1 1 t"]:
        """Added to scores: -inf where a column stands for no token of its row, else 0, and nothing but 0 in a row without tokens."""
        blind = torch.arange(max(self.lengths), device=self._table.device) >= self.counts[:, None]
        return torch.zeros_like(blind, dtype=torch.float32).masked_fill_(blind & (self.counts > 0)[:, None], -torch.inf)[:, None, None]

    @cached_property
    def counts(self) -> Int[Tensor, " b"]:
        """The lengths, where the table is."""
        return self._counts[0] if self._counts else torch.tensor(self.lengths, device=self._table.device)


@dataclass(frozen=True, slots=True)
class PagedView:
    """The same where the tokens of a row lie scattered over the blocks of a pool; columns of padding stand for no token and lie nowhere.

    Token j of a row is in block `table[row, j // page]` at slot j % page. `stretches` are the same places for each row as ranges of slots
    (block * page + slot), in order: few, as a pool keeps neighbours together; `fronts` are they for all rows together. `ascending` says of
    each row by itself that its positions ascend, which a host knows. Where there is an `older`, the first tokens of each row are in its
    blocks of codes, and table, stretches and fronts are of those behind them.
    """

    keys: Float[Tensor, "blocks page g d"]
    values: Float[Tensor, "blocks page g e"]
    table: Int[Tensor, "b most"]
    stretches: tuple[tuple[tuple[int, int], ...], ...]
    fronts: Fronts
    positions: Int[Tensor, "b t"]
    valid: Bool[Tensor, "b t"]
    lengths: Int[Tensor, " b"]
    ordered: bool
    ascending: bool
    older: tuple[Older, ...] = ()

    def homes(self) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
        """The block and the slot of each column that is not older; padding has those of the first token of its row, which is finite."""
        page = self.keys.shape[1]
        place = self._places()
        for older in self.older:
            place = (place - older.tokens[:, None]).clamp_min(0)
        return self.table.gather(1, place // page), place % page

    def gathered(self) -> LayerView:
        """The tokens side by side, each row in the columns of its view: a copy, of older ones as numbers again."""
        block, slot = self.homes()
        keys, values = (pool[block, slot] for pool in (self.keys, self.values))
        for older in self.older:
            place = self._places()
            behind, here = (place >= older.tokens[:, None])[..., None, None], place.clamp_max(older.table.shape[1] * older.page - 1)
            row = torch.arange(len(here), device=here.device)[:, None]
            keys, values = (
                new.where(behind, numbers(codes.at(older.table), older.bits, new.shape[3], new.dtype).flatten(1, 2)[row, here])
                for new, codes in ((keys, older.keys), (values, older.values))
            )
        return LayerView(keys.transpose(1, 2), values.transpose(1, 2), self.positions, self.valid, self.lengths, self.ordered)

    def _places(self) -> Int[Tensor, "b t"]:
        """Which of its row's tokens each column is."""
        return (self.valid.cumsum(1) - 1).clamp_min(0)

    def picked(self, index: Int[Tensor, "b k"]) -> LayerView:
        """These columns of each row alone: a copy of no more than they hold, but where some are older."""
        if self.older:
            return self.gathered().picked(index)
        block, slot = (place.gather(1, index) for place in self.homes())
        keys, values = (pool[block, slot].transpose(1, 2) for pool in (self.keys, self.values))
        valid = self.valid.gather(1, index)
        return LayerView(keys, values, self.positions.gather(1, index), valid, valid.sum(1))


View = LayerView | PagedView
"""What an attention looks at."""


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

    @property
    def shift(self) -> Int[Tensor, "_"]:
        """How far behind `position`, which counts tokens, the next word of each row stands on the axes that heads turn along.

        0 but for heads that turn along several (M-RoPE): there a picture of many tokens is only as long as its longer side.
        """
        ...

    def turn(self, following: Int[Tensor, " b"]) -> None:
        """Say where on these axes the next word of each row stands; `shift` holds until it is said anew."""
        ...

    def advance(self, positions: Int[Tensor, "b s"], layers: range | None = None) -> None:
        """Make room for s new tokens in these layers (or all), once per pass and before its appends. A position of -1 marks padding."""
        ...

    def append(self, layer: int, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s e"]) -> View:
        """Store the new tokens of one layer, those that `advance` announced, and return what it may now attend to."""
        ...

    def view(self, layer: int) -> LayerView:
        """What a layer may attend to now; nothing is copied that lies side by side."""
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
