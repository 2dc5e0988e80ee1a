"""The store of a layer that remembers by segments of thought (`mmsdk.kv.policies.thinkv`).

The last tokens are an open segment, exact. When it is full it is closed: its kind is told by how sparse its attention was, its tokens are
rounded, and each goes into a slot of the pool of its precision. Tokens that give way leave their slots to new ones, in place: slots are
allocated once, nothing is moved, and the order in which tokens lie there means nothing.

Letters: b rows, g key-value heads, s new tokens, t entries, n segments, m tokens, k slots, d width, c groups of channels.
"""

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from mmsdk.errors import InputError
from mmsdk.kv.entries import Arriving, Entries
from mmsdk.kv.policy import Amount, Ask
from mmsdk.kv.rounding import Bits, Codes, decode, encode
from mmsdk.kv.scoring import kept
from mmsdk.kv.segments import KEEPS, SEGMENT, fitted, kinds, lowered, ranks, sparsity
from mmsdk.kv.shelf import attended
from mmsdk.kv.slots import closed_up
from mmsdk.kv.types import LayerView

__all__ = ["Pool", "Thinking", "Thoughts"]

_BITS: tuple[Bits, Bits] = ("int4", "int2")
# A query of so many is asked how sparse its attention is, and entries of weights that may exist at one time for it (8 MiB).
_SAMPLE, _SLICE = 32, 2**21


@runtime_checkable
class Thinking(Protocol):
    """The knobs: what sparsities lie between execution, reasoning and transition, and channels that share a scale."""

    @property
    def low(self) -> float: ...

    @property
    def high(self) -> float: ...

    @property
    def group(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Pool:
    """Slots for tokens in so many bits. `positions` are -1 where a slot is free; `segments` and `ranks` tell whose token it is.

    Keys are as they were when they came, and are turned on by `moved` positions when they are read: none is rounded twice.
    """

    bits: Bits
    keys: Codes
    values: Codes
    positions: Int[Tensor, "b k"]
    segments: Int[Tensor, "b k"]
    ranks: Int[Tensor, "b k"]
    moved: Int[Tensor, "b k"]

    @classmethod
    def empty(cls, bits: Bits, slots: int, like: Float[Tensor, "b g t d"], group: int) -> "Pool":
        """All slots free."""
        blank = torch.zeros(*like.shape[:2], slots, like.shape[3], dtype=like.dtype, device=like.device)
        codes = [encode(_grouped(blank, group), -1, bits) for _ in range(2)]
        free = torch.full((len(like), slots), -1, device=like.device)
        return cls(bits, codes[0], codes[1], free, *(torch.zeros_like(free) for _ in range(3)))

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        codes = sum(x.nbytes for part in (self.keys, self.values) for x in (part.codes, part.scale, part.low))
        return codes + sum(x.nbytes for x in (self.positions, self.segments, self.ranks, self.moved))

    def unpacked(self, width: int, dtype: torch.dtype) -> tuple[Float[Tensor, "b g k d"], Float[Tensor, "b g k d"]]:
        """Keys and values of all slots, keys as they came; what is free holds any numbers."""
        group = width // self.keys.codes.shape[3]
        keys, values = (decode(part, self.bits, group, dtype).flatten(3) for part in (self.keys, self.values))
        return keys, values

    def placed(self, positions: Int[Tensor, "b k"], ahead: Int[Tensor, " b"]) -> "Pool":
        """Its tokens at other positions; see `mmsdk.kv.policy.Closing` for `ahead`."""
        by = (positions - self.positions - ahead[:, None]).where(positions >= 0, 0)
        return replace(self, positions=positions, moved=self.moved + by)

    def thinned(self, keeps: Int[Tensor, "b n"]) -> "Pool":
        """Free the slots of tokens that their segments, which keep so many each, no longer keep."""
        stays = self.ranks < keeps.gather(1, self.segments)
        return replace(self, positions=self.positions.where(stays, -1))

    def put(
        self,
        keys: Float[Tensor, "b g m d"],
        values: Float[Tensor, "b g m d"],
        told: tuple[Int[Tensor, "b m"], Int[Tensor, "b m"], Int[Tensor, "b m"]],
        take: Bool[Tensor, "b m"],
    ) -> "Pool":
        """Take in some tokens of each row, no more than there are free slots; `told` are their positions, segments and ranks."""
        count = min(keys.shape[2], self.positions.shape[1])
        source = take.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices[:, :count]
        target = (self.positions >= 0).to(torch.uint8).sort(dim=1, stable=True).indices[:, :count]
        filled = take.gather(1, source) & (self.positions.gather(1, target) < 0)
        group = keys.shape[3] // self.keys.codes.shape[3]
        wide = source[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
        new = [encode(_grouped(x.gather(2, wide), group), -1, self.bits) for x in (keys, values)]
        codes = [
            Codes(*(_placed(*pair, target, filled) for pair in ((old.codes, x.codes), (old.scale, x.scale), (old.low, x.low))))
            for old, x in zip((self.keys, self.values), new, strict=True)
        ]
        notes = [
            old.scatter(1, target, torch.where(filled, x.gather(1, source), old.gather(1, target)))
            for old, x in zip((self.positions, self.segments, self.ranks), told, strict=True)
        ]
        moved = self.moved.scatter(1, target, self.moved.gather(1, target).masked_fill(filled, 0))
        return Pool(self.bits, codes[0], codes[1], notes[0], notes[1], notes[2], moved)

    def select(self, rows: Int[Tensor, " r"]) -> "Pool":
        """A copy of these rows."""
        codes = [Codes(part.codes[rows], part.scale[rows], part.low[rows]) for part in (self.keys, self.values)]
        notes = [x[rows] for x in (self.positions, self.segments, self.ranks, self.moved)]
        return Pool(self.bits, codes[0], codes[1], *notes)


@dataclass(frozen=True, slots=True)
class Table:
    """The closed segments: kinds, levels, the tokens each had, and the slots of each row for thoughts and for transitions."""

    kind: Int[Tensor, "b n"]
    level: Int[Tensor, "b n"]
    held: Int[Tensor, "b n"]
    room: Int[Tensor, "b 2"]

    @property
    def keeps(self) -> Int[Tensor, "b n"]:
        """Tokens that each keeps."""
        return torch.tensor([*KEEPS, 0], device=self.level.device)[self.level]

    def fitting(self) -> "Table":
        """As low as there is room, for each pool by itself."""
        turns = self.kind == 0
        thoughts = fitted(self.level, self.kind, self.held.masked_fill(turns, 0), self.room[:, 0])
        transitions = fitted(self.level, self.kind, self.held.masked_fill(~turns, 0), self.room[:, 1])
        return replace(self, level=torch.where(turns, transitions, thoughts))

    def select(self, rows: Int[Tensor, " r"]) -> "Table":
        """A copy of these rows."""
        return Table(self.kind[rows], self.level[rows], self.held[rows], self.room[rows])


class Thoughts:
    """See `mmsdk.kv.policy.LayerStore`. A prompt is closed as the segments that it would have been, counted from its end."""

    def __init__(self, thinking: Thinking, amount: Amount, layer: int, depth: int) -> None:
        self._thinking, self._amount = thinking, amount
        # The prompt until it has been read, and then the open segment.
        self._entries = Entries(layer, depth)
        self._pools: tuple[Pool, ...] = ()
        self._table: tuple[Table, ...] = ()
        # whether any token in a slot was moved from where it came
        self._closed = False

    @property
    def nbytes(self) -> int:
        """See `LayerStore`."""
        tables = sum(x.nbytes for table in self._table for x in (table.kind, table.level, table.held, table.room))
        return self._entries.nbytes + sum(pool.nbytes for pool in self._pools) + tables

    @property
    def span(self) -> int:
        """See `LayerStore`."""
        heads = self._entries.keys.shape[1]
        return self._entries.span + sum(heads * pool.positions.numel() for pool in self._pools)

    @property
    def read_bytes(self) -> int:
        """See `LayerStore`."""
        return self._entries.keys.nbytes + self._entries.values.nbytes + sum(pool.nbytes for pool in self._pools)

    @property
    def lengths(self) -> Int[Tensor, "b 1"]:
        """See `LayerStore`."""
        found = self._entries.lengths
        for pool in self._pools:
            found = found + (pool.positions >= 0).sum(1, keepdim=True)
        return found

    def append(self, new: Arriving, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"]) -> None:
        """See `LayerStore`."""
        self._entries.append(new, keys, values)

    def attend(self, query: Float[Tensor, "b h s d"], ask: Ask) -> Float[Tensor, "b h s d"]:
        """See `LayerStore`."""
        entries = self._entries
        entries.turning = ask.turning
        if not self._pools:
            return attended(query, entries, ask)
        view = self._everything()
        self._sample(query, ask, view)
        out = ask.attend(query, view)
        while entries.count >= SEGMENT:
            self._close(SEGMENT, self._told())
        return out

    def settle(self) -> None:
        """See `LayerStore`."""
        if self._pools or not self._entries.count:
            return
        entries = self._entries
        keep = torch.tensor([kept(self._amount, length) for length in entries.lengths[:, 0].tolist()], device=entries.keys.device)
        fewer = (keep // 8).clamp_min(1)
        room = torch.stack(((keep - fewer).clamp_min(1), fewer), dim=1)
        group = self._thinking.group if entries.keys.shape[3] % self._thinking.group == 0 else entries.keys.shape[3]
        self._pools = tuple(Pool.empty(bits, slots, entries.keys, group) for bits, slots in zip(_BITS, room.amax(0).tolist(), strict=True))
        nothing = entries.positions[:, 0, :0]
        self._table = (Table(nothing, nothing, nothing, room),)
        # a prompt is nobody's turn of thought
        self._close(entries.count, torch.full((len(keep), -(-entries.count // SEGMENT)), 2, device=keep.device))

    def close_up(self, ahead: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        """See `mmsdk.kv.policy.Closing`, along one axis."""
        entries = self._entries
        if not self._pools:
            entries.close_up(ahead)
            return torch.zeros_like(ahead)
        closed = closed_up(torch.cat([*(pool.positions for pool in self._pools), entries.positions[:, 0]], 1))
        *slots, opened = closed.split([*(pool.positions.shape[1] for pool in self._pools), entries.count], 1)
        entries.place(opened[:, None], ahead)
        self._pools = tuple(pool.placed(positions, ahead) for pool, positions in zip(self._pools, slots, strict=True))
        self._closed = True
        return torch.zeros_like(ahead)

    def view(self) -> LayerView:
        """See `LayerStore`: a copy, in order of positions."""
        if not self._pools:
            return self._entries.view()
        found = self._everything()
        return found.picked(found.positions.argsort(dim=1))

    def keep(self, index: Int[Tensor, "b k"]) -> None:
        """Raises InputError: what stays is decided by segments."""
        raise InputError("segments decide what stays; choose another policy to thin", item="thinkv")

    def select(self, rows: Int[Tensor, " r"]) -> "Thoughts":
        """See `LayerStore`."""
        other = self.fork()
        other._entries = self._entries.select(rows)
        other._pools = tuple(pool.select(rows) for pool in self._pools)
        other._table = tuple(table.select(rows) for table in self._table)
        return other

    def fork(self) -> "Thoughts":
        """See `LayerStore`. Pools are replaced and never changed, so that they are shared."""
        other = Thoughts(self._thinking, self._amount, self._entries.layer, self._entries.depth)
        other._entries, other._pools, other._table, other._closed = self._entries.fork(), self._pools, self._table, self._closed
        return other

    def _everything(self) -> LayerView:
        """All slots and the open segment; free slots are not valid."""
        entries = self._entries
        parts = [(*pool.unpacked(entries.keys.shape[3], entries.keys.dtype), pool.positions) for pool in self._pools]
        parts.append((entries.keys, entries.values, entries.positions[:, 0]))
        keys, values = (torch.cat([part[place] for part in parts], 2) for place in (0, 1))
        if self._closed:
            by = torch.cat([*(pool.moved for pool in self._pools), torch.zeros_like(entries.positions[:, 0])], 1)
            keys = entries.turning.further(keys, by[:, None])
        positions = torch.cat([part[2] for part in parts], 1)
        return LayerView(keys, values, positions, positions >= 0, (positions >= 0).sum(1))

    def _sample(self, query: Float[Tensor, "b h s d"], ask: Ask, view: LayerView) -> None:
        """Note how sparse the attention of one query in 32 is, as columns of the tokens that ask."""
        entries, s = self._entries, query.shape[2]
        first = entries.count - s
        places = [place for place in range(s) if (first + place + 1) % _SAMPLE == 0]
        noted = torch.zeros(2, len(query), s, device=query.device)
        if places:
            chosen = torch.tensor(places, device=query.device)
            noted[0][:, chosen] = sparse(query[:, :, chosen], ask.positions[:, chosen], view)
            noted[1][:, chosen] = 1
        for name, new in zip(("sparsity", "sampled"), noted, strict=True):
            before = entries.columns.get(name, torch.zeros_like(entries.positions, dtype=torch.float32))
            entries.columns[name] = torch.cat((before[:, :, :first], new[:, None]), dim=2)

    def _told(self) -> Int[Tensor, "b 1"]:
        """The kind of the first segment of what is open."""
        sparsities, counts = (self._entries.columns[name][:, 0, :SEGMENT].sum(1, keepdim=True) for name in ("sparsity", "sampled"))
        return kinds(sparsities / counts.clamp_min(1), (self._thinking.low, self._thinking.high))

    def _close(self, count: int, kind: Int[Tensor, "b n"]) -> None:
        """Make segments of these kinds of the first tokens of what is open, and put into slots what there is room for.

        All but the first are whole.
        """
        entries, (table,) = self._entries, self._table
        blank, n = -count % SEGMENT, kind.shape[1]
        parts = [F.pad(x[:, :, :count], (0, 0, blank, 0)) for x in (entries.keys, entries.values)]
        positions = F.pad(entries.positions[:, 0, :count], (blank, 0), value=-1)
        valid = (positions >= 0).unflatten(1, (n, SEGMENT))
        held = valid.sum(2)
        level = torch.cat((lowered(table.level, kind), torch.zeros_like(kind)), 1)
        fresh = replace(table, kind=torch.cat((table.kind, kind), 1), level=level, held=torch.cat((table.held, held), 1)).fitting()
        unlike = ranks(parts[0].unflatten(2, (n, SEGMENT)).transpose(1, 2).flatten(0, 1), valid.flatten(0, 1)).view(len(valid), -1)
        number = torch.arange(n, device=kind.device).repeat_interleave(SEGMENT)
        place = (number + table.kind.shape[1]).expand(len(valid), -1)
        wanted = (unlike < fresh.keeps.gather(1, place)) & valid.flatten(1)
        pools = list[Pool]()
        for pool, own in zip(self._pools, (kind > 0, kind == 0), strict=True):
            take = wanted & own.gather(1, number.expand(len(valid), -1))
            pools.append(pool.thinned(fresh.keeps).put(parts[0], parts[1], (positions, place, unlike), take))
        self._pools, self._table = tuple(pools), (fresh,)
        left = torch.arange(count, entries.count, device=kind.device).expand(len(valid), 1, -1)
        entries.keep(left, whole=entries.whole or not left.shape[2])


def sparse(query: Float[Tensor, "b h r d"], positions: Int[Tensor, "b r"], view: LayerView) -> Float[Tensor, "b r"]:
    """How sparse the attention of each query to a view is, mean over its heads; in slices of queries."""
    b, h, _, d = query.shape
    g, t = view.keys.shape[1:3]
    found, keys = list[Tensor](), view.keys.float().transpose(2, 3)
    step = max(1, _SLICE // (b * h * t))
    for part, at in zip(query.split(step, dim=2), positions.split(step, dim=1), strict=True):
        scores = (part.float().reshape(b, g, -1, d) * d**-0.5 @ keys).view(b, h, -1, t)
        seen = ((view.positions[:, None] <= at[:, :, None]) & view.valid[:, None])[:, None].expand_as(scores)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0)
        found.append(sparsity(weights, seen).mean(1))
    return torch.cat(found, dim=1)


def _grouped(x: Float[Tensor, "b g m d"], group: int) -> Float[Tensor, "b g m c e"]:
    parts: Tensor = x.unflatten(3, (-1, group))
    return parts


def _placed(old: Tensor, new: Tensor, target: Int[Tensor, "b m"], filled: Bool[Tensor, "b m"]) -> Tensor:
    """The slots with new contents where they are filled."""
    index = target[:, None, :, None, None].expand_as(new)
    return old.scatter(2, index, torch.where(filled[:, None, :, None, None], new, old.gather(2, index)))
