"""The store of a layer in three levels, older coarser (`mmsdk.kv.policies.tiered`): exact, exact behind a mean, and means alone.

    first tokens | far: means of 16 2^i tokens | mid: blocks of 16 and their means | the last tokens
       exact            all are read                 a few blocks, else means           exact

Columns of the exact entries are [first | mid | window]. When the window has grown by some blocks they become mid, and the oldest blocks of
mid become means, whose originals are freed. Means that are too many for their level are joined in pairs for the next.

A layer that has a window of its own keeps everything, since what it does not see it must not see in a mean either.

Rows of a store go in step: blocks are counted from the end of the prompt, and sizes are those of the longest row. Prompts of a batch are
therefore parted when they have been read (`mmsdk.kv.policy.InStep`), and go on in sizes of their own (`mmsdk.kv.tier_rows`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels.ops.block_gather import block_gather
from mmsdk.kv.entries import Arriving, Entries
from mmsdk.kv.merging import Means, Partial, coarser, joined, merged, over, scores, together
from mmsdk.kv.policy import Amount, Ask
from mmsdk.kv.scoring import kept
from mmsdk.kv.shelf import attended
from mmsdk.kv.slots import closed_up
from mmsdk.kv.types import LayerView

__all__ = ["Dividing", "Levels", "Sizes", "Tiers", "exact", "weighty"]

# More tokens than ever come.
_ENDLESS = 2**62


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens at the front, in the window, and of a block; blocks of mid and how many are recalled; means of far, and when levels move.

    All but `interval`, by which the window may be longer, count towards the budget.
    """

    sinks: int
    window: int
    block: int
    mid: int
    recalled: int
    far: int
    interval: int


@runtime_checkable
class Dividing(Protocol):
    """Says how a budget is divided."""

    def sizes(self, keep: int) -> Sizes:
        """Of a budget in tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Levels:
    """What a store is made of: entries [first | mid | window], and means, if there are any, those of mid in front of those of far.

    `first` are tokens, `mid` blocks of `block` tokens, of which so many are `recalled`.
    """

    entries: Entries
    means: tuple[Means, ...]
    first: int
    mid: int
    block: int
    recalled: int

    @property
    def count(self) -> int:
        """How many means there are."""
        return sum(means.count for means in self.means)

    @property
    def front(self) -> Means:
        """The first tokens, as so many means of one."""
        entries, here = self.entries, slice(0, self.first)
        positions = entries.positions[:, 0, here]
        return Means(entries.keys[:, :, here], entries.values[:, :, here], (positions >= 0).long(), positions)


class Tiers:
    """See `mmsdk.kv.policy.LayerStore`. Several new tokens of a row at one time are attended to as one is, by their positions."""

    def __init__(self, plan: Dividing, amount: Amount, layer: int, depth: int) -> None:
        self._plan, self._amount, self._depth = plan, amount, depth
        self._entries = Entries(layer, depth)
        # None of them before a prompt was read; `laid` when the first tokens stand in front of the others.
        self._sizes: tuple[Sizes, ...] = ()
        self._laid = self._local = False
        self._first = self._mid = self._levelled = 0
        self._mids: tuple[Means, ...] = ()
        self._far: list[Means] = []
        self._means: tuple[Means, ...] = ()

    @property
    def nbytes(self) -> int:
        """See `LayerStore`."""
        return self._entries.nbytes + sum(means.nbytes for means in self._means)

    @property
    def span(self) -> int:
        """See `LayerStore`; a mean is as large as a token."""
        return self._entries.span + sum(means.keys.shape[0] * means.keys.shape[1] * means.count for means in self._means)

    @property
    def read_bytes(self) -> int:
        """See `LayerStore`."""
        return self._entries.read * sum(x.shape[3] * x.element_size() for x in (self._entries.keys, self._entries.values))

    @property
    def lengths(self) -> Int[Tensor, "b 1"]:
        """Exact tokens and means of each row."""
        found = self._entries.lengths
        return found + sum((means.sizes > 0).sum(1, keepdim=True) for means in self._means) if self._means else found

    def append(self, new: Arriving, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"]) -> None:
        """See `LayerStore`."""
        self._entries.append(new, keys, values)

    def attend(self, query: Float[Tensor, "b h s d"], ask: Ask) -> Float[Tensor, "b h s d"]:
        """See `LayerStore`."""
        self._entries.turning = ask.turning
        self._local = ask.window > 0
        out = self._over_levels(query, ask) if self._means else attended(query, self._entries, ask)
        if self._sizes:
            self.age()
        return out

    def settle(self) -> None:
        """See `LayerStore`. Rows of a batch have the sizes of the longest."""
        if not self._sizes:
            entries = self._entries
            longest = entries.count if entries.whole else int(entries.lengths.max())
            self._sizes = (self._plan.sizes(kept(self._amount, longest)),)
        self._age(self._sizes[0], 0)

    @property
    def steady(self) -> bool:
        """Whether a prompt has been read, so that the store may go on beside those of other rows (`mmsdk.kv.tier_rows`)."""
        return bool(self._sizes)

    @property
    def levels(self) -> Levels:
        """What it is made of, once a prompt has been read."""
        sizes = self._sizes[0]
        return Levels(self._entries, self._means, self._first, self._mid, sizes.block, min(sizes.recalled, self._mid))

    @property
    def room(self) -> int:
        """How many tokens may come before levels move; below 0 where they are due."""
        sizes, count = self._sizes[0], self._entries.count
        if self._local:
            return _ENDLESS
        if self._laid:
            return sizes.window + sizes.interval - (count - self._first - self._mid * sizes.block)
        return sizes.sinks + sizes.window + sizes.mid * (sizes.block + 1) + sizes.far + sizes.interval - count

    @property
    def interval(self) -> int:
        """By how many tokens the window may grow."""
        return self._sizes[0].interval

    def age(self) -> None:
        """Move levels, if they are due."""
        self._age(self._sizes[0], self._sizes[0].interval)

    def told(self, count: int, whole: bool) -> None:
        """So many tokens came and were read, where its entries lie (`Entries.told`)."""
        self._entries.told(count, whole)
        self._note()

    def lie(self, means: Means) -> None:
        """Look at the same means where somebody else keeps them."""
        ends = list(accumulate((part.count for part in (*self._mids, *self._far)), initial=0))
        views = [means.part(*ends) for ends in pairwise(ends)]
        self._means, self._mids, self._far = (means,), tuple(views[: len(self._mids)]), views[len(self._mids) :]

    def close_up(self, ahead: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        """See `mmsdk.kv.policy.Closing`, along one axis. Tokens that are exact and means of far follow one another: a mean, however many
        tokens it is of, takes one place, to which its latest token moves and the others with it; a mean of mid goes where its block does.
        """
        entries, sizes = self._entries, self._sizes
        if not self._means or not sizes:
            entries.close_up(ahead)
            return torch.zeros_like(ahead)
        far = self._means[0].part(self._mid, self._means[0].count)
        closed = closed_up(torch.cat((far.positions, entries.positions[:, 0]), 1))
        by = closed[:, : far.count] - far.positions - ahead[:, None]
        far = replace(far, keys=entries.turning.further(far.keys, by[:, None]), positions=closed[:, : far.count])
        entries.place(closed[:, None, far.count :], ahead)
        self._mids = (merged(*self._blocks()),) if self._mids else ()
        ends = list(accumulate((means.count for means in self._far), initial=0))
        self._far = [far.part(*part) for part in pairwise(ends)]
        self._gather()
        return torch.zeros_like(ahead)

    def view(self) -> LayerView:
        """Means, each at the position of its latest token, and exact tokens behind them: a copy where there are means."""
        exact = self._entries.view()
        if not self._means:
            return exact
        (means,) = self._means
        keys, values = torch.cat((means.keys, exact.keys), 2), torch.cat((means.values, exact.values), 2)
        positions = torch.cat((means.positions, exact.positions), 1)
        return LayerView(keys, values, positions, positions >= 0, (positions >= 0).sum(1))

    def keep(self, index: Int[Tensor, "b k"]) -> None:
        """Raises InputError: what stays is decided by the levels."""
        raise InputError("its levels decide what stays; choose another policy to thin", item="tiered")

    def select(self, rows: Int[Tensor, " r"]) -> "Tiers":
        """See `LayerStore`."""
        entries = self._entries.select(rows)
        other = self._other(entries, [means.select(rows) for means in self._far], [means.select(rows) for means in self._mids])
        gone = self._entries.count - entries.count - self._first
        if gone > 0 and self._mids:
            # padding of all rows went as far as into mid: what is left of a block is read like the first tokens
            block = self._sizes[0].block
            cut = min(-(-gone // block), self._mid)
            other._first, other._mid = max(0, cut * block - gone), self._mid - cut
            other._mids = (other._mids[0].part(cut, self._mid),)
            other._gather()
        else:
            other._first = self._first + min(0, self._entries.count - entries.count)
        return other

    def fork(self) -> "Tiers":
        """See `LayerStore`."""
        return self._other(self._entries.fork(), self._far, self._mids)

    def _other(self, entries: Entries, far: Sequence[Means], mids: Sequence[Means]) -> "Tiers":
        other = Tiers(self._plan, self._amount, entries.layer, self._depth)
        other._entries, other._sizes, other._laid, other._local = entries, self._sizes, self._laid, self._local
        other._first, other._mid, other._levelled = self._first, self._mid, self._levelled
        other._far, other._mids = list(far), tuple(mids)
        other._gather()
        return other

    def _over_levels(self, query: Float[Tensor, "b h s d"], ask: Ask) -> Float[Tensor, "b h s d"]:
        """All levels, several new tokens as so many more heads of their group, which choose the blocks that are recalled together."""
        entries, sizes, (means,) = self._entries, self._sizes[0], self._means
        g, s = entries.keys.shape[1], query.shape[2]
        asking = query.unflatten(1, (g, -1)).flatten(1, 3)
        found = scores(asking, means)
        parts, start = list[Partial](), self._first + self._mid * sizes.block
        if self._mid:
            index = recalled(found[..., : self._mid], means.sizes[:, : self._mid], sizes.recalled)
            there = torch.zeros_like(found[:, :, 0], dtype=torch.bool).scatter_(2, index, True)
            found = found.masked_fill(there[:, :, None], -torch.inf)
            here, nothing = slice(self._first, start), torch.zeros(index.shape, device=index.device)
            originals = entries.keys[:, :, here], entries.values[:, :, here], index, nothing, entries.valid[:, 0, here]
            parts.append(block_gather(asking, *originals, index.new_zeros(len(query)), sizes.block, query.shape[3] ** -0.5))
        parts.append(over(asking, means.values, found))
        for here in (slice(0, self._first), slice(start, entries.count)):
            seen = entries.valid[:, :, here] & (entries.positions[:, :, here] <= ask.positions[:, :, None])
            parts.append(exact(asking, entries.keys[:, :, here], entries.values[:, :, here], seen))
        self._note()
        out: Tensor = joined(parts).unflatten(1, (-1, s))
        return out

    def _note(self) -> None:
        """How much of it a query reads."""
        levels, entries = self.levels, self._entries
        unread = (levels.mid - levels.recalled) * levels.block
        entries.read = entries.keys.shape[0] * entries.keys.shape[1] * (entries.count - unread + levels.count)

    def _blocks(self) -> tuple[Float[Tensor, "b g n m d"], Float[Tensor, "b g n m d"], Int[Tensor, "b n m"]]:
        """Those of mid, as views."""
        entries, block = self._entries, self._sizes[0].block
        here = slice(self._first, self._first + self._mid * block)
        keys, values = (x[:, :, here].unflatten(2, (-1, block)) for x in (entries.keys, entries.values))
        return keys, values, entries.positions[:, 0, here].unflatten(1, (-1, block))

    def _age(self, sizes: Sizes, allowed: int) -> None:
        """Move what is too old for its level, once the window is longer than it should be by more than is allowed."""
        entries = self._entries
        if self._local:
            return
        if entries.count <= sizes.sinks + sizes.window + sizes.mid * (sizes.block + 1) + sizes.far + allowed and not self._laid:
            return
        if not self._laid:
            self._lay(sizes)
        window = entries.count - self._first - self._mid * sizes.block
        late = (window - sizes.window) // sizes.block
        if window - sizes.window <= allowed or late < 1:
            return
        self._mid += late
        mids, old = merged(*self._blocks()), max(0, self._mid - sizes.mid)
        self._mid -= old
        if old:
            self._cascade(mids.part(0, old), sizes)
            places = torch.arange(entries.count, device=entries.positions.device)
            stays = torch.cat((places[: self._first], places[self._first + old * sizes.block :]))
            entries.keep(stays.expand(len(entries.keys), 1, -1), entries.whole, sizes.interval)
        self._mids = (mids.part(old, self._mid + old),)
        self._gather()

    def _lay(self, sizes: Sizes) -> None:
        """Bring the first tokens of each row to the front, and fill up so that blocks end where the window begins."""
        entries = self._entries
        places = torch.arange(entries.count, device=entries.positions.device).expand(len(entries.keys), -1)
        order = entries.order[:, 0]
        front = places.masked_fill((order < 0) | (order >= sizes.sinks), entries.count).sort(1).values[:, : sizes.sinks]
        rest = places.masked_fill(order < sizes.sinks, -1)
        fill = rest.new_full((len(rest), -(entries.count - sizes.window) % sizes.block), -1)
        index = torch.cat((front.masked_fill(front == entries.count, -1), fill, rest), 1)
        entries.keep(index[:, None], False)
        self._first, self._laid = sizes.sinks, True

    def _cascade(self, new: Means, sizes: Sizes) -> None:
        """Means come in at the finest level; of a level that is full the oldest are joined in pairs and go on to the next.

        The last level keeps one mean of all that is older than it has room for.
        """
        first, level = not self._levelled, 0
        if first:
            self._levelled = capacity(sizes.far, new.count)
        while new.count:
            if level == len(self._far):
                self._far.append(new.part(0, 0))
            whole = together((self._far[level], new))
            more = max(0, whole.count - self._levelled)
            if more and level == max(1, sizes.far // self._levelled) - 1:
                oldest = coarser(whole.part(0, more + 1), more + 1)
                self._far[level], new = together((oldest, whole.part(more + 1, whole.count))), new.part(0, 0)
                continue
            if first and more % 2:
                # pairs are counted from the end of the prompt, as blocks are
                whole, more = together((whole.blank(), whole)), more + 1
            more -= more % 2
            self._far[level], new = whole.part(more, whole.count), coarser(whole.part(0, more), 2)
            level += 1

    def _gather(self) -> None:
        """All means side by side, those of mid first; the parts are views of that, so that nothing else is kept."""
        parts = [*self._mids, *self._far]
        if parts:
            self.lie(together(parts))


def recalled(found: Float[Tensor, "b g r n"], sizes: Int[Tensor, "b n"], count: int) -> Int[Tensor, "b g k"]:
    """The blocks whose means weigh most for any of the queries of a group, each of whose weights sum to 1."""
    return weighty(found, sizes).topk(min(count, found.shape[3]), dim=-1).indices


def weighty(found: Float[Tensor, "b g r n"], sizes: Int[Tensor, "b n"]) -> Float[Tensor, "b g n"]:
    """By that: the logarithm of a weight, -inf for a block of no token."""
    return found.log_softmax(-1).masked_fill((sizes == 0)[:, None, None], -torch.inf).amax(2)


def capacity(means: int, blocks: int) -> int:
    """How many means a level may hold, so that few enough levels hold at most `means` of so many blocks: the fewest levels that do."""
    levels = 1
    while max(1, means // levels) * (2**levels - 1) < blocks:
        levels += 1
    return max(1, means // levels)


def exact(
    query: Float[Tensor, "b h d"], keys: Float[Tensor, "b g t d"], values: Float[Tensor, "b g t d"], seen: Bool[Tensor, "b s t"]
) -> Partial:
    """Some columns, of which each of the s new tokens sees its own; it stands s times below each head."""
    found = query.float().unflatten(1, (keys.shape[1], -1)) @ keys.float().transpose(2, 3) * query.shape[2] ** -0.5
    blind = ~seen[:, None, None]
    return over(query, values, found.unflatten(2, (-1, seen.shape[1])).masked_fill(blind, -torch.inf).flatten(2, 3))
