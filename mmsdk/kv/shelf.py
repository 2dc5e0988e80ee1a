"""The store of a layer whose policy evicts, or chooses what is read: the entries, the budgets, and when they are met."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kv.entries import Arriving, Entries
from mmsdk.kv.policy import Amount, Ask, Early, Evictor, Mover, Observer, Reader
from mmsdk.kv.scoring import all_but_one, chosen, kept
from mmsdk.kv.types import LayerView

__all__ = ["Shelf", "attended"]

# Room behind what stays, where the next eviction is further off than that.
_ROOM = 4


def attended(query: Float[Tensor, "b h s d"], entries: Entries, ask: Ask) -> Float[Tensor, "b h s e"]:
    """Exact attention to everything that is held, whichever heads hold what."""
    view = entries.rows()
    entries.read = entries.keys.shape[0] * entries.keys.shape[1] * entries.count
    if len(view.positions) == len(query):
        return ask.attend(query, view)
    return ask.attend(by_heads(query, entries.keys.shape[1]), view).reshape(*query.shape[:3], -1)


def by_heads(query: Float[Tensor, "b h s d"], kv_heads: int) -> Float[Tensor, "n r s d"]:
    """The queries with every key-value head as a row, as `Entries.heads` has the entries."""
    return query.reshape(-1, query.shape[1] // kv_heads, *query.shape[2:])


class Shelf:
    """See `mmsdk.kv.policy.LayerStore`. A prompt is kept whole until it has been read (`settle`); from then on budgets hold."""

    def __init__(self, policy: Evictor | Reader, amount: Amount, layer: int, depth: int) -> None:
        self.entries = Entries(layer, depth)
        self._policy, self._amount = policy, amount
        # what a policy is besides, found out once: every token of every layer would ask
        self._evictors: tuple[Evictor, ...] = (policy,) if isinstance(policy, Evictor) else ()
        self._readers: tuple[Reader, ...] = (policy,) if isinstance(policy, Reader) else ()
        self._observers: tuple[Observer, ...] = (policy,) if isinstance(policy, Observer) else ()
        self._movers: tuple[Mover, ...] = (policy,) if isinstance(policy, Mover) else ()
        self._early = isinstance(policy, Early)
        self._interval = sum(one.interval for one in self._evictors)
        # Tokens that each row may keep; none before the first prompt was read.
        self._budgets: list[int] = []
        # No row holds more tokens than this, and where it is exact they are as many: a device is asked only when one may be due.
        self._most: list[int] = []
        self._exact = True
        # The budgets on the device, once they are wanted there.
        self._bounds: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """See `LayerStore`."""
        return self.entries.nbytes

    @property
    def span(self) -> int:
        """See `LayerStore`."""
        return self.entries.span

    @property
    def read_bytes(self) -> int:
        """See `LayerStore`."""
        return self.entries.read * sum(x.shape[3] * x.element_size() for x in (self.entries.keys, self.entries.values))

    @property
    def lengths(self) -> Int[Tensor, "b q"]:
        """See `LayerStore`."""
        return self.entries.lengths

    def append(self, new: Arriving, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s e"]) -> None:
        """See `LayerStore`."""
        self.entries.append(new, keys, values)
        self._most = [most + keys.shape[2] for most in self._most or [0] * len(keys)]
        self._exact = self._exact and new.ordered

    def attend(self, query: Float[Tensor, "b h s d"], ask: Ask) -> Float[Tensor, "b h s e"]:
        """See `LayerStore`."""
        self.entries.turning = ask.turning
        single = query.shape[2] == 1
        if single and self._early:
            self._look(query, ask)
            return attended(query, self.entries, ask)
        if single and self._readers and self._budgets:
            out = self._readers[0].read(query, self.entries, ask, self._keep)
        else:
            out = attended(query, self.entries, ask)
        self._look(query, ask)
        return out

    def settle(self) -> None:
        """See `LayerStore`."""
        self._budgets = self._budgets or [kept(self._amount, length) for length in self._longest()]
        self._thin(1)
        if not self._curious:
            self.entries.forget()

    def close_up(self, ahead: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        """See `Closing`. What a policy moves itself it brings back itself."""
        for one in self._movers:
            return one.close_up(self.entries, ahead)
        self.entries.close_up(ahead)
        return torch.zeros_like(ahead)

    def view(self) -> LayerView:
        """See `LayerStore`."""
        return self.entries.view()

    def keep(self, index: Int[Tensor, "b k"]) -> None:
        """See `LayerStore`."""
        self.entries.keep(index[:, None], self.entries.whole)
        self._most, self._exact = [index.shape[1]] * len(index), self.entries.whole

    def select(self, rows: Int[Tensor, " r"]) -> "Shelf":
        """See `LayerStore`."""
        return self._other(self.entries.select(rows), rows.tolist())

    def fork(self) -> "Shelf":
        """See `LayerStore`."""
        return self._other(self.entries.fork(), range(len(self._most)))

    def under(self, amount: Amount) -> "Shelf":
        """The same entries and notes under another amount, as if none had been thinned yet; for prompts that are read once for several."""
        other = self._other(self.entries.fork(), range(len(self._most)))
        other._amount, other._budgets = amount, []
        return other

    @property
    def _curious(self) -> bool:
        """Whether what is noted will be looked at again."""
        return bool(self._interval) or not self._budgets or bool(self._readers)

    @property
    def _keep(self) -> Int[Tensor, " b"]:
        self._bounds = self._bounds or (torch.tensor(self._budgets, device=self.entries.keys.device),)
        return self._bounds[0]

    def _longest(self) -> list[int]:
        """Tokens of each row."""
        if not self._exact:
            self._most, self._exact = self.entries.lengths.amax(1).tolist(), True
        return self._most

    def _look(self, query: Float[Tensor, "b h s d"], ask: Ask) -> None:
        """Show the policy who asks, and evict what is due: of each row when its own interval is over, whatever its neighbours hold."""
        for one in self._observers if self._curious else ():
            one.observe(self.entries, query, ask)
        if self._interval and self._budgets:
            self._thin(self._interval)

    def _thin(self, least: int) -> None:
        """Bring the rows that hold so many tokens above their budget, or more, back to it; heads that hold fewer keep what they hold."""
        if not any(most - budget >= least for most, budget in zip(self._most, self._budgets, strict=True)) or not self._evictors:
            return
        pairs = list(zip(self._longest(), self._budgets, strict=True))
        left = [budget if length - budget >= least else length for length, budget in pairs]
        if left == self._most:
            return
        entries, keep = self.entries, self._keep
        if left != self._budgets:
            lengths = entries.lengths.amax(1)
            keep = keep.where(lengths - keep >= least, lengths)
        scores = self._evictors[0].scores(entries, keep)
        room = min(self._interval or _ROOM, _ROOM)
        if entries.whole and entries.count > 1 and set(left) == {entries.count - 1}:
            entries.drop(all_but_one(scores), room)
        else:
            index = chosen(scores, entries.valid, keep[:, None].minimum(entries.lengths), max(left))
            entries.keep(index, len(set(left)) == 1, room)
        self._most = left
        for one in self._movers:
            one.move(entries)

    def _other(self, entries: Entries, rows: Sequence[int]) -> "Shelf":
        other = Shelf(self._policy, self._amount, entries.layer, entries.depth)
        other.entries, other._exact = entries, self._exact
        other._most, other._budgets = ([some[row] for row in rows] if some else [] for some in (self._most, self._budgets))
        return other
