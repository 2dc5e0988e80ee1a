"""The store of a layer in two arenas, for what is likely to stay and for what is not (`mmsdk.kv.policies.omnitide`).

    sticky:    words, first tokens, edges of units       pages are never moved
    volatile:  the inside of pictures and clips          pages less than half full are joined with a neighbour

Tokens keep the order in which they came by their positions, wherever they lie: one that goes leaves a hole, one that comes takes a hole of
its arena, and when pages are joined tokens move and their positions do not.

Letters: b rows, h heads, g key-value heads, s new tokens, t slots, n moves, d width.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kv.entries import Arriving, Entries
from mmsdk.kv.policy import Amount, Ask
from mmsdk.kv.received import received
from mmsdk.kv.scoring import kept
from mmsdk.kv.shelf import attended
from mmsdk.kv.slots import closed_up
from mmsdk.kv.types import LayerView
from mmsdk.kv.units import Picking, edges, numbered, parted, picked, scored

__all__ = ["Arena", "Arenas", "Tide", "Told", "joins"]


@dataclass(frozen=True, slots=True)
class Tide:
    """The knobs: tokens of a page and of a unit at most, what is pinned, when a layer is thinned, and how attention is followed."""

    picking: Picking
    page: int
    unit: int
    sinks: int
    recent: int
    interval: int
    sample: int
    follow: float


@dataclass(frozen=True, slots=True)
class Told:
    """What is told of tokens or slots: position (-1 for none), unit, kind (0 a word), and the attention that it gets."""

    positions: Int[Tensor, "b t"]
    units: Int[Tensor, "b t"]
    kinds: Int[Tensor, "b t"]
    mass: Float[Tensor, "b t"]

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All of it, in order."""
        return self.positions, self.units, self.kinds, self.mass

    def at(self, index: Int[Tensor, "b k"]) -> "Told":
        """Of some of them."""
        return Told(*(x.gather(1, index) for x in self.parts))

    def followed(self, later: "Told") -> "Told":
        """And then of others."""
        return Told(*(torch.cat(pair, 1) for pair in zip(self.parts, later.parts, strict=True)))

    def only(self, stays: Bool[Tensor, "b t"]) -> "Told":
        """The others are none."""
        return replace(self, positions=self.positions.where(stays, -1))

    def select(self, rows: Int[Tensor, " r"]) -> "Told":
        """A copy of these rows."""
        return Told(*(x[rows] for x in self.parts))


@dataclass(frozen=True, slots=True)
class Arena:
    """Slots of pages, each row's for itself; replaced and never changed. No row holds more than `most` tokens, as far as the host knows."""

    keys: Float[Tensor, "b g t d"]
    values: Float[Tensor, "b g t d"]
    told: Told
    page: int
    most: int

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.keys.nbytes + self.values.nbytes + sum(x.nbytes for x in self.told.parts)

    @property
    def span(self) -> int:
        """Slots of the pages in use, over rows and heads."""
        used = (self.told.positions >= 0).unflatten(1, (-1, self.page)).any(2)
        return int(used.sum()) * self.page * self.keys.shape[1]

    def put(self, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"], new: Told, most: int) -> "Arena":
        """Take in new tokens of each row, those that are any, `most` of a row at most; the earliest free slots come first."""
        if not most:
            return self
        grown = self.grown(self.most + most - self.told.positions.shape[1])
        order = (new.positions < 0).to(torch.uint8).sort(dim=1, stable=True).indices[:, :most]
        free = (grown.told.positions >= 0).to(torch.uint8).sort(dim=1, stable=True).indices[:, :most]
        coming, there = new.at(order), grown.told.at(free)
        real = coming.positions >= 0
        pairs = zip(grown.told.parts, coming.parts, there.parts, strict=True)
        told = Told(*(x.scatter(1, free, torch.where(real, a, b)) for x, a, b in pairs))
        pools = []
        for pool, x in ((grown.keys, keys), (grown.values, values)):
            source, target = (index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]) for index in (order, free))
            pools.append(pool.scatter(2, target, torch.where(real[:, None, :, None], x.gather(2, source), pool.gather(2, target))))
        return Arena(pools[0], pools[1], told, self.page, self.most + most)

    def grown(self, missing: int) -> "Arena":
        """With pages for so many more slots."""
        if missing <= 0:
            return self
        more = -(-missing // self.page) * self.page
        blank = len(self.keys), more
        free = Told(
            self.told.positions.new_full(blank, -1),
            self.told.units.new_zeros(blank),
            self.told.kinds.new_zeros(blank),
            self.told.mass.new_zeros(blank),
        )
        keys, values = (torch.cat((x, x.new_zeros(*x.shape[:2], more, x.shape[3])), 2) for x in (self.keys, self.values))
        return Arena(keys, values, self.told.followed(free), self.page, self.most)

    def thinned(self, stays: Bool[Tensor, "b t"], compacts: bool) -> "Arena":
        """Free the slots of all other tokens, and then join pages."""
        told = self.told.only(stays)
        most = int((told.positions >= 0).sum(1).max()) if told.positions.shape[1] else 0
        left = replace(self, told=told, most=most)
        return left.compacted() if compacts else left

    def compacted(self) -> "Arena":
        """Pages less than half full joined with a neighbour: one gather over all slots."""
        index = joins(self.told.positions >= 0, self.page).to(self.keys.device)
        wide = index.clamp_min(0)[:, None, :, None].expand_as(self.keys)
        told = self.told.at(index.clamp_min(0)).only(index >= 0)
        return replace(self, keys=self.keys.gather(2, wide), values=self.values.gather(2, wide), told=told)

    def select(self, rows: Int[Tensor, " r"]) -> "Arena":
        """A copy of these rows."""
        return replace(self, keys=self.keys[rows], values=self.values[rows], told=self.told.select(rows))


class Arenas:
    """See `mmsdk.kv.policy.LayerStore`. `hear` says of what kind the tokens of the next pass are; unless it is said, they are words."""

    def __init__(self, tide: Tide, amount: Amount, layer: int, depth: int) -> None:
        self._tide, self._amount = tide, amount
        # The prompt, until it has been read; sticky and volatile from then on, and what each row may keep.
        self._entries = Entries(layer, depth)
        self._arenas: tuple[Arena, ...] = ()
        self._keep: tuple[int, ...] = ()
        # How many tokens each row holds, as the host counts them: whether a row is thinned is nobody else's business.
        self._held: tuple[int, ...] = ()
        self._heard: tuple[Tensor, ...] = ()
        self._unseen, self._turning = 0, self._entries.turning

    @property
    def nbytes(self) -> int:
        """See `LayerStore`."""
        return self._entries.nbytes + sum(arena.nbytes for arena in self._arenas)

    @property
    def span(self) -> int:
        """Slots of the pages in use, over rows and heads."""
        return sum(arena.span for arena in self._arenas) if self._arenas else self._entries.span

    @property
    def read_bytes(self) -> int:
        """See `LayerStore`: of all slots, the free ones among them."""
        return sum(x.nbytes for held in self._arenas or (self._entries,) for x in (held.keys, held.values))

    @property
    def lengths(self) -> Int[Tensor, "b 1"]:
        """See `LayerStore`."""
        if not self._arenas:
            return self._entries.lengths
        return torch.stack([(arena.told.positions >= 0).sum(1) for arena in self._arenas]).sum(0)[:, None]

    def hear(self, kinds: Int[Tensor, "b s"]) -> None:
        """The kinds of the tokens that come next: 0 a word, else the number of the picture or clip, counted from 1."""
        self._heard = (kinds,)

    def append(self, new: Arriving, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"]) -> None:
        """See `LayerStore`. Raises InputError where kinds were told of another number of tokens."""
        words, kinds = not self._heard, self._heard[0] if self._heard else torch.zeros_like(new.positions)
        if kinds.shape != new.positions.shape:
            raise InputError(f"kinds were told of {tuple(kinds.shape)} tokens, {tuple(new.positions.shape)} came", item="kinds")
        self._heard = ()
        if self._arenas:
            told = self._arrived(new.positions, kinds)
            came = [keys.shape[2]] * len(keys) if new.ordered else new.lengths.tolist()
            self._held = tuple(held + more for held, more in zip(self._held, came, strict=True))
            self._split(keys.detach(), values.detach(), told, kinds == 0, words)
            return
        entries = self._entries
        entries.append(new, keys, values)
        before = entries.columns.get("kind", torch.zeros_like(entries.positions))
        entries.columns["kind"] = torch.cat((before[:, :, : entries.count - keys.shape[2]], kinds[:, None]), 2)

    def attend(self, query: Float[Tensor, "b h s d"], ask: Ask) -> Float[Tensor, "b h s d"]:
        """See `LayerStore`."""
        entries, self._turning = self._entries, ask.turning
        if not self._arenas:
            entries.turning = ask.turning
            entries.columns["mass"] = self._look(query, ask, entries.rows())[:, None]
            return attended(query, entries, ask)
        view = self._everything()
        self._unseen += query.shape[2]
        if self._unseen >= self._tide.sample:
            self._follow(self._look(query, ask, view))
        out = ask.attend(query, view)
        due = [held - keep >= self._tide.interval for held, keep in zip(self._held, self._keep, strict=True)]
        if any(due):
            self._thin(torch.tensor(due, device=query.device))
        return out

    def settle(self) -> None:
        """See `LayerStore`: what stays of a prompt goes into pages, and the memory of all of it is freed."""
        if self._arenas or not self._entries.count:
            return
        entries, tide = self._entries, self._tide
        self._keep = tuple(kept(self._amount, length) for length in entries.lengths[:, 0].tolist())
        positions, kinds = entries.positions[:, 0], entries.columns["kind"][:, 0]
        valid = positions >= 0
        told = Told(positions, parted(positions, kinds, tide.unit), kinds, entries.columns["mass"][:, 0])
        told = told.only(self._stays(told))
        sticky = (kinds == 0) | (valid.cumsum(1) <= tide.sinks) | edges(numbered(told.units, valid), valid)
        free = told.at(torch.zeros(len(positions), 0, dtype=torch.long, device=positions.device))
        # memory of their own: views would keep that of the prompt
        keys, values = (x.new_zeros(*x.shape[:2], 0, x.shape[3]) for x in (entries.keys, entries.values))
        nothing = Arena(keys, values, free, tide.page, 0)
        self._arenas = (nothing, nothing)
        self._split(entries.keys, entries.values, told, sticky, words=False)
        self._entries = Entries(entries.layer, entries.depth)
        self._held = tuple(self.lengths[:, 0].tolist())

    def close_up(self, ahead: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        """See `mmsdk.kv.policy.Closing`, along one axis. Slots stay as they are: positions change, and keys turn with them."""
        if not self._arenas:
            self._entries.close_up(ahead)
            return torch.zeros_like(ahead)
        parts = closed_up(self._told().positions).split([arena.told.positions.shape[1] for arena in self._arenas], dim=1)
        moved = []
        for arena, positions in zip(self._arenas, parts, strict=True):
            by = positions - arena.told.positions - ahead[:, None]
            moved.append(replace(arena, keys=self._turning.further(arena.keys, by[:, None]), told=replace(arena.told, positions=positions)))
        self._arenas = tuple(moved)
        return torch.zeros_like(ahead)

    def view(self) -> LayerView:
        """See `LayerStore`: a copy, in order of positions."""
        if not self._arenas:
            return self._entries.view()
        found = self._everything()
        return found.picked(found.positions.argsort(dim=1, stable=True))

    def keep(self, index: Int[Tensor, "b k"]) -> None:
        """Raises InputError: what stays is decided by units."""
        raise InputError("units decide what stays; choose another policy to thin", item="omnitide")

    def select(self, rows: Int[Tensor, " r"]) -> "Arenas":
        """See `LayerStore`."""
        other = self.fork()
        other._arenas = tuple(arena.select(rows) for arena in self._arenas)
        if self._arenas:
            other._keep, other._held = (tuple(of[row] for row in rows.tolist()) for of in (self._keep, self._held))
            other._turning = self._turning.select(rows)
        else:
            other._entries = self._entries.select(rows)
        return other

    def fork(self) -> "Arenas":
        """See `LayerStore`. Arenas are replaced and never changed, so that they are shared."""
        other = Arenas(self._tide, self._amount, self._entries.layer, self._entries.depth)
        other._entries, other._arenas = self._entries.fork(), self._arenas
        other._keep, other._held = self._keep, self._held
        other._unseen, other._turning = self._unseen, self._turning
        return other

    def _everything(self) -> LayerView:
        sticky, volatile = self._arenas
        keys, values = torch.cat((sticky.keys, volatile.keys), 2), torch.cat((sticky.values, volatile.values), 2)
        positions = torch.cat((sticky.told.positions, volatile.told.positions), 1)
        return LayerView(keys, values, positions, positions >= 0, (positions >= 0).sum(1))

    def _told(self) -> Told:
        """Of all slots, in the order of `_everything`."""
        return self._arenas[0].told.followed(self._arenas[1].told)

    def _look(self, query: Float[Tensor, "b h s d"], ask: Ask, view: LayerView) -> Float[Tensor, "b t"]:
        """The attention that the last of the queries give."""
        last = slice(-max(1, self._tide.recent), None)
        return received(query[:, :, last], ask.positions[:, last], view)

    def _follow(self, mass: Float[Tensor, "b t"]) -> None:
        """Move what is known of each token's attention towards what it gets now."""
        self._unseen = 0
        parts = mass.split([arena.told.positions.shape[1] for arena in self._arenas], dim=1)
        self._arenas = tuple(
            replace(arena, told=replace(arena.told, mass=torch.lerp(arena.told.mass, part, self._tide.follow)))
            for arena, part in zip(self._arenas, parts, strict=True)
        )

    def _arrived(self, positions: Int[Tensor, "b s"], kinds: Int[Tensor, "b s"]) -> Told:
        """New tokens go on with the newest unit where their kind is its kind, until it is full."""
        told = self._told()
        newest = told.positions.argmax(1, keepdim=True)
        last, kind = told.units.gather(1, newest), told.kinds.gather(1, newest)
        size = ((told.units == last) & (told.positions >= 0)).sum(1, keepdim=True)
        turns = torch.cat((kinds[:, :1] != kind, kinds[:, 1:] != kinds[:, :-1]), 1).cumsum(1)
        ahead = torch.where(turns > 0, 0, size) + torch.arange(positions.shape[1], device=positions.device)
        units = last + (turns << 32) + ahead // self._tide.unit
        return Told(positions, units, kinds, torch.zeros(positions.shape, device=positions.device))

    def _split(
        self, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"], new: Told, sticky: Bool[Tensor, "b s"], words: bool
    ) -> None:
        """Each token to its arena. Where all are words the device is not asked how many there are."""
        parts = [new.only(sticky), new.only(~sticky)]
        counts = [keys.shape[2], 0] if words else torch.stack([(part.positions >= 0).sum(1).amax() for part in parts]).tolist()
        self._arenas = tuple(arena.put(keys, values, *pair) for arena, *pair in zip(self._arenas, parts, counts, strict=True))

    def _stays(self, told: Told) -> Bool[Tensor, "b t"]:
        """What units say, of tokens in any order."""
        order = told.positions.argsort(dim=1, stable=True)
        row, keep = told.at(order), torch.tensor(self._keep, device=order.device)[:, None]
        valid = row.positions >= 0
        place, unit = valid.cumsum(1) - 1, numbered(row.units, valid)
        sinks, recent = (keep // 4).clamp_max(self._tide.sinks), (keep // 2).clamp_max(self._tide.recent)
        pinned = valid & ((place < sinks) | (place >= valid.sum(1, keepdim=True) - recent))
        score = scored(unit, valid, row.mass, row.kinds, self._tide.picking)
        stays = picked(unit, valid, pinned, row.mass, score, keep[:, 0], self._tide.picking.share)
        return torch.zeros_like(stays).scatter_(1, order, stays)

    def _thin(self, due: Bool[Tensor, " b"]) -> None:
        """Free the slots of what goes of the rows that are due, and join pages of the volatile arena."""
        stays = self._stays(self._told()) | ~due[:, None]
        parts = stays.split([arena.told.positions.shape[1] for arena in self._arenas], dim=1)
        self._arenas = tuple(arena.thinned(part, order == 1) for order, (arena, part) in enumerate(zip(self._arenas, parts, strict=True)))
        self._held = tuple(self.lengths[:, 0].tolist())


def joins(used: Bool[Tensor, "b t"], page: int) -> Int[Tensor, "b t"]:
    """What each slot holds when pages are joined: the slot whose token it takes, -1 where it is free.

    Page by page, one that is less than half full goes into the free slots of the last page in front of it that is in use, or takes its
    tokens, if both fit into one. Decided on the host, page by page and row by row.
    """
    flags = used.cpu().numpy()
    found = np.where(flags, np.arange(flags.shape[1]), -1)
    for row, held in enumerate(flags):
        home, count = 0, page
        for here, size in enumerate(held.reshape(-1, page).sum(axis=1).tolist()):
            if not size:
                continue
            if 2 * min(size, count) >= page or size + count > page:
                home, count = here, size
                continue
            slots, to = found[row, here * page : (here + 1) * page], found[row, home * page : (home + 1) * page]
            to[np.flatnonzero(to < 0)[:size]] = slots[slots >= 0]
            slots[:] = -1
            count += size
    return torch.from_numpy(found).to(used.device)
