"""Rows of different lengths in one pass: the tokens of a batch one after another, each attending within its own row only.

Linear maps and norms need not know where a row ends. Attention does, and what is fast differs: on a processor the rows of equal length are
one call each (no padding is computed and no mask is read: faster there than padded rows under a mask, and far faster than torch's nested
tensors, whose attention is built from small steps); on a GPU torch's jagged layout runs all rows in one kernel by the offsets of the rows.

Linear maps on a processor are prepared anew for every number of tokens that they have not met, which takes longer than a block does. So
that lengths that differ from picture to picture meet the same few numbers, `filled` rows end in zeros that nothing reads.

Letters: b rows, s tokens of all rows together, p of these with the filling, m tokens of the longest row, d width, h heads, e width of a
head.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.vision.native import everywhere

__all__ = ["Rows", "attention", "filled", "jagged_attention", "received"]

_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class Rows:
    """The length of each row, and where every token stood when each row had `full` tokens: row * full + place, ascending.

    The first `first` tokens of a row are class tokens, which always stay.
    """

    lengths: tuple[int, ...]
    token: Int[Tensor, " s"]
    full: int
    first: int

    @staticmethod
    def of(b: int, full: int, first: int, device: torch.device) -> "Rows":
        """b rows from which nothing was removed yet."""
        return Rows((full,) * b, torch.arange(b * full, device=device), full, first)

    @property
    def row(self) -> Int[Tensor, " s"]:
        """The row of each token."""
        return self.token // self.full

    @property
    def patch(self) -> Bool[Tensor, " s"]:
        """True for all but class tokens."""
        return self.token % self.full >= self.first

    @property
    def starts(self) -> Int[Tensor, " b"]:
        """Where each row begins."""
        return self.offsets[:-1]

    @property
    def offsets(self) -> Int[Tensor, " c"]:
        """Where each row begins, and at last where all end: c = b + 1 (cu_seqlens)."""
        ends = torch.tensor((0, *self.lengths), device=self.token.device)
        return ends.cumsum(0)

    def narrowed(self, stays: Bool[Tensor, " s"]) -> "tuple[Int[Tensor, ' k'], Rows]":
        """The places of the tokens that stay, class tokens whatever `stays` says of them, and the rows that they make.

        The lengths are read back from the device: shapes hang on them.
        """
        index = (stays | ~self.patch).nonzero()[:, 0]
        token = self.token[index]
        lengths = torch.bincount(token // self.full, minlength=len(self.lengths))
        return index, Rows(tuple(lengths.tolist()), token, self.full, self.first)

    def chosen(self, wanted: Bool[Tensor, " b"]) -> "tuple[Int[Tensor, ' k'], Rows]":
        """The places of the tokens of the rows that are wanted, and these rows, numbered anew."""
        row = self.row
        index = wanted[row].nonzero()[:, 0]
        number = (wanted.cumsum(0) - 1)[row[index]]
        lengths = tuple(length for length, mine in zip(self.lengths, wanted.tolist(), strict=True) if mine)
        return index, Rows(lengths, number * self.full + self.token[index] % self.full, self.full, self.first)

    def padded(self, values: Float[Tensor, "s *k"]) -> Float[Tensor, "b m *k"]:
        """The rows of values side by side, zeros behind the shorter ones; a view where there is none."""
        b, most = len(self.lengths), max(self.lengths)
        if min(self.lengths) == most:
            whole: Tensor = values.unflatten(0, (b, most))
            return whole
        place = torch.arange(len(values), device=values.device) - self.starts[self.row]
        wide = values.new_zeros(b * most, *values.shape[1:]).index_copy_(0, self.row * most + place, values)
        filled_up: Tensor = wide.unflatten(0, (b, most))
        return filled_up

    def buckets(self) -> dict[int, list[slice]]:
        """Where the rows of each length are; neighbours of one length as one slice."""
        found: dict[int, list[slice]] = defaultdict(list)
        start, before = 0, -1
        for length in self.lengths:
            if length == before:
                found[length][-1] = slice(found[length][-1].start, start + length)
            else:
                found[length].append(slice(start, start + length))
            start, before = start + length, length
        return found


def attention(
    query: Float[Tensor, "s h e"], key: Float[Tensor, "s h e"], value: Float[Tensor, "s h e"], rows: Rows
) -> Float[Tensor, "s h e"]:
    """Scaled dot-product attention within each row. Rows of one length are computed as a plain batch is, bit for bit."""
    buckets = rows.buckets()
    if len(buckets) == 1:
        return _bucket(query, key, value, rows.lengths[0])
    if query.is_cuda:
        return jagged_attention(query, key, value, rows)
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    for length, places in buckets.items():
        mixed = _bucket(_taken(query, places), _taken(key, places), _taken(value, places), length)
        for place, part in zip(places, mixed.split([p.stop - p.start for p in places]), strict=True):
            out[place] = part
    return out


def filled(x: Float[Tensor, "s *k"]) -> Float[Tensor, "p *k"]:
    """The tokens with zeros behind them, up to a multiple of 16."""
    missing = -len(x) % _MULTIPLE
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x


def jagged_attention(
    query: Float[Tensor, "s h e"], key: Float[Tensor, "s h e"], value: Float[Tensor, "s h e"], rows: Rows
) -> Float[Tensor, "s h e"]:
    """The same over torch's jagged layout, all rows in one kernel."""
    offsets, (least, most) = rows.offsets, (min(rows.lengths), max(rows.lengths))
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(x.contiguous(), offsets, min_seqlen=least, max_seqlen=most).transpose(1, 2)
        for x in (query, key, value)
    )
    mixed: Tensor = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).values()
    return mixed


def received(query: Float[Tensor, "s h e"], key: Float[Tensor, "s h e"], rows: Rows) -> Float[Tensor, " s"]:
    """The attention that each token receives from the first token of its row, mean over heads, in float32; a row's sum is 1."""
    out = torch.empty(len(query), device=query.device)
    for length, places in rows.buckets().items():
        for place in places:
            keys = key[place].unflatten(0, (-1, length)).permute(0, 2, 3, 1)
            first = query[place].unflatten(0, (-1, length))[:, 0, :, None]
            weights = ((first @ keys).float() * key.shape[-1] ** -0.5).softmax(dim=-1)
            out[place] = weights.mean(dim=(1, 2)).flatten()
    return out


def _bucket(query: Tensor, key: Tensor, value: Tensor, length: int) -> Tensor:
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (query, key, value))
    return everywhere(q, k, v).transpose(1, 2).flatten(0, 1)


def _taken(x: Tensor, places: list[slice]) -> Tensor:
    return x[places[0]] if len(places) == 1 else torch.cat([x[place] for place in places])
