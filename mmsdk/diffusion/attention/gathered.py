"""Block-sparse attention on a processor: only the blocks on a row's list are read, whoever does the arithmetic.

Where there is the C++ of `mmsdk.kernels.cpu.blocks`, it reads keys and values where they lie. Elsewhere torch does it: rows of all heads
are ordered by how many keys they read and taken in groups. The keys of a group's rows are gathered side by side, and the group is one batch
of products, each row an entry of it. Where its rows read unequally many, shorter ones are filled up to the longest, which, the rows being
ordered, is little. Nothing else is ever computed. Gathered keys and scores go into the same memory group after group: new memory for each
would cost more than the arithmetic. A group's scores fit into the cores' caches.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from mmsdk.diffusion.attention.types import Blocks
from mmsdk.kernels.cpu import blocks as native

__all__ = ["gathered"]

# Bytes of a group's scores, or so: measured on two cores with 2 MiB of cache each.
_GROUP = 2**22


def gathered(
    query: Float[Tensor, "b h s d"],
    keys: Float[Tensor, "b g t d"],
    values: Float[Tensor, "b g t d"],
    mask: Bool[Tensor, "b h rows columns"],
    queries: Blocks,
    entries: Blocks,
    scale: float,
) -> Float[Tensor, "b h s d"]:
    """What `mmsdk.kernels.ops.block_sparse` computes, of tokens that stand in the order of their blocks. Rows that read nothing give 0."""
    if native.here(query, keys, values):
        device = torch.device("cpu")
        return native.attend(query, keys, values, mask, queries.bounds(device), entries.bounds(device), scale)
    plain = query.dtype == torch.float32 and not (torch.is_grad_enabled() and any(x.requires_grad for x in (query, keys, values)))
    work: _Products | _Fused = _Products(scale) if plain else _Fused(scale)
    rows = _Rows.of(query, queries)
    read = _Read.of(mask, rows, keys, values, entries)
    out = torch.zeros_like(rows.query)
    for low, high in read.groups(queries.size * query.element_size()):
        place, real = read.places(low, high)
        mixed = work(rows.query[read.rows[low:high]], read.keys, read.values, place, real)
        out.index_copy_(0, read.rows[low:high], mixed)
    return rows.tokens(out)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The queries of all blocks of all heads, filled up to whole blocks; `token` is where each belongs, None where blocks are even."""

    query: Float[Tensor, "n size d"]
    token: Int[Tensor, "n size"] | None
    real: Bool[Tensor, "n size"] | None
    shape: tuple[int, int, int, int]

    @staticmethod
    def of(query: Tensor, blocks: Blocks) -> "_Rows":
        b, h, s, d = query.shape
        if blocks.starts is None:
            return _Rows(F.pad(query, (0, 0, 0, -s % blocks.size)).reshape(-1, blocks.size, d), None, None, (b, h, s, d))
        first, last = (side.reshape(-1, 1) for side in _spans(blocks, b, h, s))
        token = first + torch.arange(blocks.size)
        real = token < last
        return _Rows(query.reshape(-1, d)[token.clamp(max=b * h * s - 1)], token, real, (b, h, s, d))

    @property
    def alive(self) -> Bool[Tensor, " n"]:
        """Whether a block holds any query."""
        return torch.ones(len(self.query), dtype=torch.bool) if self.real is None else self.real[:, 0]

    def tokens(self, out: Float[Tensor, "n size d"]) -> Float[Tensor, "b h s d"]:
        """What was computed of the blocks, as the tokens stand."""
        b, h, s, d = self.shape
        if self.token is None or self.real is None:
            return out.view(b, h, -1, d)[:, :, :s]
        flat = out.new_zeros(b * h * s, d)
        return flat.index_copy_(0, self.token[self.real], out[self.real]).view(b, h, s, d)


@dataclass(frozen=True, slots=True)
class _Read:
    """The rows that read something, the longest first, and what they read.

    A unit is what is gathered at once: a whole block where these are even, the last one filled up, else a token. Row i reads `lengths[i]`
    of them: those from begin[j] to begin[j] + counts[j] for the blocks j from stops[i - 1] to stops[i]. The units of an even head are
    `columns`, the last of which holds `ragged` tokens.
    """

    keys: Float[Tensor, "units sized"]
    values: Float[Tensor, "units sized"]
    rows: Int[Tensor, " m"]
    lengths: Int[Tensor, " m"]
    stops: list[int]
    begin: Int[Tensor, " blocks"]
    counts: Int[Tensor, " blocks"]
    size: int
    columns: int
    ragged: int

    @staticmethod
    def of(mask: Tensor, rows: _Rows, keys: Tensor, values: Tensor, entries: Blocks) -> "_Read":
        b, g, t, d = keys.shape
        size = entries.size if entries.starts is None else 1
        if entries.starts is None:
            keys, values = (F.pad(x, (0, 0, 0, -t % size)) for x in (keys, values))
            start = torch.arange(b * g * entries.count).view(b * g, -1)
            held = torch.ones_like(start)
        else:
            start, stop = _spans(entries, b, g, t)
            held = stop - start
        chosen = mask.flatten(0, 2)
        # of which key-value head each row reads
        owner = torch.arange(b * g).repeat_interleave(len(chosen) // (b * g))
        lengths = (mask.view(b * g, -1, mask.shape[3]).to(torch.float32) @ held.to(torch.float32)[..., None]).flatten().long()
        lengths, order = lengths.masked_fill(~rows.alive, 0).sort(descending=True, stable=True)
        order = order[: int((lengths > 0).sum())]
        row, column = chosen[order].nonzero(as_tuple=True)
        home = owner[order][row]
        stops = row.bincount(minlength=len(order)).cumsum(0).tolist()
        k, v = (x.reshape(-1, size * d) for x in (keys, values))
        found = start[home, column], held[home, column]
        return _Read(k, v, order, lengths[: len(order)], stops, *found, size, entries.count, t - (entries.count - 1) * size)

    def groups(self, unit_bytes: int) -> Iterator[tuple[int, int]]:
        """From which to which row each group goes."""
        counts, low, threads = self.lengths.tolist(), 0, torch.get_num_threads()
        while low < len(counts):
            # a thread takes whole rows, and all take equally many
            rounds = _GROUP // (counts[low] * self.size * unit_bytes * threads)
            high = min(low + max(rounds, 1) * threads, len(counts))
            yield low, high
            low = high

    def places(self, low: int, high: int) -> tuple[Int[Tensor, "m most"], Bool[Tensor, "m t"] | None]:
        """The units that each row of a group reads, and which of their tokens are there; no second where all are."""
        part = slice(self.stops[low - 1] if low else 0, self.stops[high - 1])
        unit, lengths, most = self.begin[part], self.lengths[low:high], int(self.lengths[low])
        if self.size == 1:
            counts = self.counts[part]
            unit = (unit - counts.cumsum(0) + counts).repeat_interleave(counts)
            unit += torch.arange(len(unit))
        full = len(unit) == (high - low) * most
        if full and (self.size == 1 or self.ragged == self.size):
            return unit.view(-1, most), None
        real = torch.arange(most) < lengths[:, None]
        place = unit.view(-1, most) if full else _filled(unit, real)
        if self.size == 1:
            return place, real
        tokens = torch.where(place % self.columns == self.columns - 1, self.ragged, self.size)
        return place, ((torch.arange(self.size) < tokens[..., None]) & real[..., None]).flatten(1)


def _filled(unit: Int[Tensor, " n"], real: Bool[Tensor, "m most"]) -> Int[Tensor, "m most"]:
    """Units row by row, shorter rows filled up with their own first one: what stands elsewhere may be no number."""
    place = torch.zeros(real.shape, dtype=torch.int64).masked_scatter_(real, unit)
    return place.where(real, place[:, :1])


class _Products:
    """softmax(q k^T) v by plain products in memory that is used again. Without gradients, in float32."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._rooms = [torch.empty(0) for _ in range(3)]

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, place: Tensor, real: Tensor | None) -> Tensor:
        m, size, d = query.shape
        k = torch.index_select(keys, 0, place.flatten(), out=self._room(0, place.numel(), keys.shape[1])).view(m, -1, d)
        v = torch.index_select(values, 0, place.flatten(), out=self._room(1, place.numel(), keys.shape[1])).view(m, -1, d)
        scores = torch.bmm(query.mul_(self._scale), k.transpose(1, 2), out=self._room(2, m, size, k.shape[1]))
        if real is not None:
            scores.masked_fill_(~real[:, None], -torch.inf)
        weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        return torch.bmm(weights, v).div_(weights.sum(-1, keepdim=True))

    def _room(self, which: int, *shape: int) -> Tensor:
        """Room for such a tensor; more is made where the last one was smaller."""
        wanted = torch.Size(shape).numel()
        if self._rooms[which].numel() < wanted:
            self._rooms[which] = torch.empty(wanted)
        return self._rooms[which][:wanted].view(shape)


class _Fused:
    """The same by torch's fused kernel, which keeps scores in float32 whatever the dtype, and has a gradient."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, place: Tensor, real: Tensor | None) -> Tensor:
        m, _, d = query.shape
        k, v = (x.index_select(0, place.flatten()).view(m, 1, -1, d) for x in (keys, values))
        bias = None if real is None else torch.zeros(real.shape, dtype=query.dtype).masked_fill_(~real, -torch.inf)[:, None, None]
        return F.scaled_dot_product_attention(query[:, None], k, v, bias, scale=self._scale)[:, 0]


def _spans(blocks: Blocks, b: int, heads: int, length: int) -> tuple[Int[Tensor, "bh blocks"], Int[Tensor, "bh blocks"]]:
    """Where each block begins and ends among the tokens of all heads of all rows."""
    bounds = blocks.bounds(torch.device("cpu")).long().expand(b, heads, -1).flatten(0, 1)
    bounds = bounds + torch.arange(b * heads)[:, None] * length
    return bounds[:, :-1], bounds[:, 1:]
