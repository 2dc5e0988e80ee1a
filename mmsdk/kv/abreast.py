"""Conversations that each have a memory of their own, as the rows of one batch.

    cache = abreast([one, other])       # takes both over
    one, other = apart(cache)           # and gives them back

They go through the decoder's matrices together, and each attends to what is its own: nothing is padded, copied or moved when one comes or
goes, and what a policy does for a row is what it does for that row alone. Where there is something that reads such rows together, it does
(`mmsdk.kv.tier_rows`): they are brought into one pool, anew when one comes or goes.

Letters: b rows, h heads, g key-value heads, s new tokens, t entries of the longest row, k entries kept, d width of a key, e of a value; q
is 1 or g.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mmsdk.kv.entries import Arriving
from mmsdk.kv.policy import Ask, LayerStore
from mmsdk.kv.policy_cache import PolicyCache
from mmsdk.kv.tier_rows import FEW, TierRows, joinable
from mmsdk.kv.types import LayerView

__all__ = ["Abreast", "abreast", "apart"]


def abreast(caches: Sequence[PolicyCache]) -> PolicyCache:
    """One cache of the single rows of several, whose stores go on in it."""
    stores = [Abreast(own) for own in zip(*(cache.stores for cache in caches), strict=True)]
    ends: dict[tuple[int, ...], Tensor] = {}
    following = []
    for layer in range(len(stores)):
        agreeing = tuple(id(cache.next(layer)) for cache in caches)
        if agreeing not in ends:
            ends[agreeing] = torch.cat([cache.next(layer) for cache in caches])
        following.append(ends[agreeing])
    return PolicyCache(stores, following, torch.cat([cache.shift for cache in caches]))


def apart(cache: PolicyCache) -> list[PolicyCache]:
    """The rows of a cache that `abreast` made, each by itself again, or the one of any other; the cache is not to be used any more."""
    if not all(isinstance(store, Abreast) for store in cache.stores):
        assert len(cache.shift) == 1, "rows come apart that were put together"
        return [cache]
    return [_row(cache, place) for place in range(len(cache.shift))]


def _row(cache: PolicyCache, place: int) -> PolicyCache:
    here, own = slice(place, place + 1), list[LayerStore]()
    for store in cache.stores:
        assert isinstance(store, Abreast), "only what stands abreast comes apart"
        own.append(store.rows[place])
    ends = {id(cache.next(layer)): cache.next(layer)[here] for layer in range(len(own))}
    return PolicyCache(own, [ends[id(cache.next(layer))] for layer in range(len(own))], cache.shift[here])


class Abreast:
    """See `mmsdk.kv.policy.LayerStore`: those of one row each, side by side."""

    def __init__(self, rows: Sequence[LayerStore]) -> None:
        self._rows = tuple(rows)
        # what reads them all at one time, where there is such a thing
        self._joined: tuple[TierRows, ...] = ()

    @property
    def rows(self) -> tuple[LayerStore, ...]:
        """The store of each row, to be looked at: what comes next may not be written there."""
        for joined in self._joined:
            joined.part()
        return self._rows

    @staticmethod
    def of(store: LayerStore, rows: Int[Tensor, " r"]) -> "Abreast":
        """A copy of each of these rows of a store, without what pads it."""
        return Abreast([store.select(row) for row in rows.split(1)])

    @property
    def nbytes(self) -> int:
        """See `LayerStore`."""
        return sum(row.nbytes for row in self.rows)

    @property
    def span(self) -> int:
        """See `LayerStore`."""
        return sum(row.span for row in self.rows)

    @property
    def read_bytes(self) -> int:
        """See `LayerStore`."""
        return sum(row.read_bytes for row in self.rows)

    @property
    def lengths(self) -> Int[Tensor, "b q"]:
        """See `LayerStore`."""
        found = [row.lengths for row in self.rows]
        return torch.cat([one.expand(-1, max(other.shape[1] for other in found)) for one in found])

    def append(self, new: Arriving, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s e"]) -> None:
        """See `LayerStore`."""
        few = keys.shape[2] <= FEW
        if few and not self._joined and (tiers := joinable(self._rows)):
            self._joined = (TierRows(tiers),)
        if few and self._joined:
            self._joined[0].append(new, keys, values)
            return
        for place, row in enumerate(self._parted()):
            row.append(new.row(place), keys[place : place + 1], values[place : place + 1])

    def attend(self, query: Float[Tensor, "b h s d"], ask: Ask) -> Float[Tensor, "b h s e"]:
        """See `LayerStore`."""
        if self._joined:
            return self._joined[0].attend(query, ask)
        return torch.cat([row.attend(query[place : place + 1], ask.row(place)) for place, row in enumerate(self._rows)])

    def settle(self) -> None:
        """See `LayerStore`."""
        for row in self._parted():
            row.settle()

    def view(self) -> LayerView:
        """See `LayerStore`; shorter rows are padded in front."""
        views = [row.view() for row in self.rows]
        most = max(view.positions.shape[1] for view in views)
        ahead = [most - view.positions.shape[1] for view in views]
        keys, values = (
            torch.cat([F.pad(x, (0, 0, size, 0)) for x, size in zip(parts, ahead, strict=True)])
            for parts in ([view.keys for view in views], [view.values for view in views])
        )
        positions = torch.cat([F.pad(view.positions, (size, 0), value=-1) for view, size in zip(views, ahead, strict=True)])
        valid = torch.cat([F.pad(view.valid, (size, 0)) for view, size in zip(views, ahead, strict=True)])
        return LayerView(keys, values, positions, valid, valid.sum(1), not any(ahead) and all(view.ordered for view in views))

    def keep(self, index: Int[Tensor, "b k"]) -> None:
        """See `LayerStore`; what is padding in the view of all is none in a row's own."""
        rows = self._parted()
        lengths = [row.view().positions.shape[1] for row in rows]
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            own = index[place] - (max(lengths) - length)
            row.keep(own[own >= 0][None])

    def select(self, rows: Int[Tensor, " r"]) -> "Abreast":
        """See `LayerStore`."""
        first = torch.zeros(1, dtype=torch.long, device=rows.device)
        return Abreast([self.rows[row].select(first) for row in rows.tolist()])

    def fork(self) -> "Abreast":
        """See `LayerStore`."""
        return Abreast([row.fork() for row in self._parted()])

    def _parted(self) -> tuple[LayerStore, ...]:
        """The store of each row, to be changed: nothing is read together until more comes."""
        rows, self._joined = self.rows, ()
        return rows
