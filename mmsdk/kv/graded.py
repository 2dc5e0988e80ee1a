"""The store of a layer whose prompt is kept in as many bits as each entry is worth (`mmsdk.kv.policies.rdkv`).

An entry is a token of one key-value head: heads keep different tokens, and none takes memory that it has no bits for. Entries of 2, 4 and 8
bits are codes with a scale and a minimum of their own; those of 16 are as they came. Before a key is rounded its channels are made alike,
by the mean and the spread that each has over the prompt: some are large for every token and would leave nothing of the others. What comes
after the prompt is kept as it is.

Letters: b rows, g key-value heads, t entries, w entries of the head that keeps most, n entries of one precision, d width.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kv.asked import last_queries, mass
from mmsdk.kv.entries import Arriving, Entries
from mmsdk.kv.policy import Amount, Ask
from mmsdk.kv.rounding import Bits, Codes, decode, encode
from mmsdk.kv.scoring import kept
from mmsdk.kv.shelf import attended, by_heads
from mmsdk.kv.types import LayerView

__all__ = ["Graded", "Grading", "Packed", "packed"]

_NAMES: dict[int, Bits] = {2: "int2", 4: "int4", 8: "int8"}


@runtime_checkable
class Grading(Protocol):
    """Says how many bits an entry is worth."""

    @property
    def window(self) -> int:
        """The last tokens of the prompt, whose queries are asked and which stay as they are."""
        ...

    def bits(
        self,
        keys: Float[Tensor, "b g t d"],
        values: Float[Tensor, "b g t d"],
        received: Float[Tensor, "b g t"],
        recent: Bool[Tensor, "b t"],
        valid: Bool[Tensor, "b t"],
        keep: Int[Tensor, " b"],
    ) -> Int[Tensor, "b g t"]:
        """0, 2, 4, 8 or 16 for each, of keys whose channels are alike; `received` is the attention that the last queries gave it."""
        ...


@dataclass(frozen=True, slots=True)
class Grade:
    """Entries of one precision: where each stands among b * g * w, and its key and value, as codes or as they are."""

    bits: int
    place: Int[Tensor, " n"]
    keys: Codes | Tensor
    values: Codes | Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.place.nbytes + _bytes(self.keys) + _bytes(self.values)

    def of(self, index: Int[Tensor, " m"], place: Int[Tensor, " m"]) -> "Grade":
        """Some of them, at other places."""
        return Grade(self.bits, place.to(self.place.dtype), _some(self.keys, index), _some(self.values, index))


@dataclass(frozen=True, slots=True)
class Packed:
    """A prompt in its grades. Positions are -1 in front of what a head keeps; a key is what was stored times `spread` plus `middle`."""

    grades: tuple[Grade, ...]
    positions: Int[Tensor, "b g w"]
    middle: Float[Tensor, "b g d"]
    spread: Float[Tensor, "b g d"]

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(grade.nbytes for grade in self.grades) + self.positions.nbytes + self.middle.nbytes + self.spread.nbytes

    def unpacked(self, dtype: torch.dtype) -> tuple[Float[Tensor, "b g w d"], Float[Tensor, "b g w d"]]:
        """Keys and values as numbers again, 0 where a head keeps none."""
        shape = *self.positions.shape, self.middle.shape[2]
        keys, values = (torch.zeros(shape, dtype=dtype, device=self.positions.device).flatten(0, 2) for _ in range(2))
        for grade in self.grades:
            values[grade.place] = _numbers(grade.values, grade.bits, shape[3], dtype)
            key = _numbers(grade.keys, grade.bits, shape[3], dtype)
            if grade.bits < 16:
                head = grade.place // shape[2]
                key = torch.addcmul(self.middle.flatten(0, 1)[head], key.float(), self.spread.flatten(0, 1)[head]).to(dtype)
            keys[grade.place] = key
        return keys.unflatten(0, shape[:3]), values.unflatten(0, shape[:3])

    def select(self, rows: Int[Tensor, " r"]) -> "Packed":
        """A copy of these rows."""
        grades, each = list[Grade](), self.positions[0].numel()
        for grade in self.grades:
            owner = grade.place // max(each, 1)
            index = [(owner == row).nonzero()[:, 0] for row in rows]
            place = [grade.place[part] % max(each, 1) + order * each for order, part in enumerate(index)]
            grades.append(grade.of(torch.cat(index), torch.cat(place)))
        return Packed(tuple(grades), self.positions[rows], self.middle[rows], self.spread[rows])


def packed(entries: Entries, bits: Int[Tensor, "b g t"], middle: Float[Tensor, "b g d"], spread: Float[Tensor, "b g d"]) -> Packed:
    """The entries that have bits, in order."""
    stays = bits > 0
    counts = stays.sum(-1, keepdim=True)
    width = int(counts.max())
    # shorter ones are padded in front, as everywhere
    place = stays.cumsum(-1) - 1 + width - counts
    b, g, _ = bits.shape
    flat = (torch.arange(b * g, device=bits.device).view(b, g, 1) * width + place).to(torch.int32)
    positions = torch.full((b * g * width,), -1, dtype=torch.int32, device=bits.device)
    positions[flat[stays]] = entries.positions.expand(-1, g, -1)[stays].to(torch.int32)
    grades, even = list[Grade](), (entries.keys.float() - middle[:, :, None]) / spread[:, :, None]
    for level in (2, 4, 8, 16):
        here = bits == level
        keys, values = (even.to(entries.keys.dtype) if level < 16 else entries.keys)[here], entries.values[here]
        if level < 16:
            grades.append(Grade(level, flat[here], encode(keys, -1, _NAMES[level]), encode(values, -1, _NAMES[level])))
        else:
            grades.append(Grade(level, flat[here], keys, values))
    return Packed(tuple(grade for grade in grades if len(grade.place)), positions.view(b, g, width), middle, spread)


class Graded:
    """See `mmsdk.kv.policy.LayerStore`."""

    def __init__(self, grading: Grading, amount: Amount, layer: int, depth: int) -> None:
        self._grading, self._amount = grading, amount
        # The prompt until it has been read, and then what comes after it.
        self._entries = Entries(layer, depth)
        self._packed: tuple[Packed, ...] = ()

    @property
    def nbytes(self) -> int:
        """See `LayerStore`."""
        return self._entries.nbytes + sum(packed.nbytes for packed in self._packed)

    @property
    def span(self) -> int:
        """See `LayerStore`."""
        return self._entries.span + sum(len(grade.place) for packed in self._packed for grade in packed.grades)

    @property
    def read_bytes(self) -> int:
        """See `LayerStore`."""
        exact = self._entries.keys, self._entries.values
        return sum(x.nbytes for x in exact) + sum(packed.nbytes for packed in self._packed)

    @property
    def lengths(self) -> Int[Tensor, "b q"]:
        """See `LayerStore`."""
        found = self._entries.lengths
        for packed in self._packed:
            found = found + (packed.positions >= 0).sum(-1)
        return found

    def append(self, new: Arriving, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"]) -> None:
        """See `LayerStore`."""
        self._entries.append(new, keys, values)

    def attend(self, query: Float[Tensor, "b h s d"], ask: Ask) -> Float[Tensor, "b h s d"]:
        """See `LayerStore`."""
        self._entries.turning = ask.turning
        if not self._packed:
            last_queries(self._entries, query, ask, self._grading.window)
            return attended(query, self._entries, ask)
        return ask.attend(by_heads(query, self._entries.keys.shape[1]), self._heads()).reshape(query.shape)

    def settle(self) -> None:
        """See `LayerStore`. The bits of a prompt are given once."""
        if self._packed or not self._entries.count:
            return
        entries, lengths = self._entries, self._entries.lengths[:, 0]
        keep = torch.tensor([kept(self._amount, length) for length in lengths.tolist()], device=lengths.device)
        valid, order = entries.valid[:, 0], entries.order[:, 0]
        middle, spread = channels(entries.keys, valid)
        # the last tokens stay as they are, as far as they take no more than half of the budget
        recent = (order >= (lengths - torch.minimum(keep // 2, torch.full_like(keep, self._grading.window)))[:, None]) & valid
        even = (entries.keys.float() - middle[:, :, None]) / spread[:, :, None]
        bits = self._grading.bits(even, entries.values, mass(entries), recent, valid, keep)
        self._packed = (packed(entries, bits, middle, spread),)
        later = entries.fork()
        later.keep(entries.positions[:, :, :0], whole=True)
        later.forget()
        self._entries = later

    def view(self) -> LayerView:
        """See `LayerStore`: a copy."""
        if not self._packed:
            return self._entries.view()
        heads, g = self._heads(), self._entries.keys.shape[1]
        positions = heads.positions.unflatten(0, (-1, g)).amax(1)
        keys, values = (x[:, 0].unflatten(0, (-1, g)) for x in (heads.keys, heads.values))
        return LayerView(keys, values, positions, positions >= 0, (positions >= 0).sum(1))

    def keep(self, index: Int[Tensor, "b k"]) -> None:
        """Raises InputError: what stays is decided by its bits."""
        raise InputError("bits decide what stays of a prompt; choose another policy to thin", item="rdkv")

    def select(self, rows: Int[Tensor, " r"]) -> "Graded":
        """See `LayerStore`."""
        return self._other(self._entries.select(rows), tuple(packed.select(rows) for packed in self._packed))

    def fork(self) -> "Graded":
        """See `LayerStore`."""
        return self._other(self._entries.fork(), self._packed)

    def _other(self, entries: Entries, packed: tuple[Packed, ...]) -> "Graded":
        other = Graded(self._grading, self._amount, entries.layer, entries.depth)
        other._entries, other._packed = entries, packed
        return other

    def _heads(self) -> LayerView:
        """All that is held, every head as a row."""
        ((packed,), later) = self._packed, self._entries
        keys, values = packed.unpacked(later.keys.dtype)
        keys, values = torch.cat((keys, later.keys), 2).flatten(0, 1)[:, None], torch.cat((values, later.values), 2).flatten(0, 1)[:, None]
        positions = torch.cat((packed.positions, later.positions.expand(-1, packed.positions.shape[1], -1)), 2).flatten(0, 1)
        return LayerView(keys, values, positions, positions >= 0, (positions >= 0).sum(1))


def channels(keys: Float[Tensor, "b g t d"], valid: Bool[Tensor, "b t"]) -> tuple[Float[Tensor, "b g d"], Float[Tensor, "b g d"]]:
    """The mean and the standard deviation of each channel over the real tokens; a channel that is the same in all has a deviation of 1."""
    share = (valid.float() / valid.sum(1, keepdim=True).clamp_min(1))[:, None, :, None]
    wide = keys.float().masked_fill(~valid[:, None, :, None], 0)
    middle = (wide * share).sum(2)
    spread = ((wide - middle[:, :, None]).square() * share).sum(2).sqrt()
    return middle, torch.where(spread > 1e-6, spread, 1)


def _bytes(x: Codes | Tensor) -> int:
    return x.nbytes if isinstance(x, Tensor) else x.codes.nbytes + x.scale.nbytes + x.low.nbytes


def _some(x: Codes | Tensor, index: Int[Tensor, " m"]) -> Codes | Tensor:
    return x[index] if isinstance(x, Tensor) else Codes(x.codes[index], x.scale[index], x.low[index])


def _numbers(x: Codes | Tensor, bits: int, width: int, dtype: torch.dtype) -> Float[Tensor, "n d"]:
    return x if isinstance(x, Tensor) else decode(x, _NAMES[bits], width, dtype)
