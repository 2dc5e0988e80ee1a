"""Reach: layers trained at 64 tokens are asked for needles among 64, 256 and 1,024: full attention, HiLS, NSA."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.apps.console import Cell, busy
from mmsdk.attention.hils import Hierarchy
from mmsdk.attention.nsa import Sparsity
from mmsdk.decoder.hils import LandmarkAttention
from mmsdk.decoder.norm import RMSNorm
from mmsdk.decoder.nsa import NativeSparseAttention
from mmsdk.decoder.rope import Rope, Rotation, Unscaled
from mmsdk.errors import InputError
from mmsdk.kv.none import NoCache

__all__ = ["Reach"]

Kind = Literal["full", "hils", "nsa"]

# A token has a key and a value; the first keys are those of needles. The last tokens of a row ask for the values of needles, by key.
_KEYS, _NEEDLES, _VALUES, _ASKED = 40, 8, 8, 4
_WIDTH, _HEADS, _GROUPS, _HEAD = 64, 4, 2, 16
# The slowest channels turn by less than a radian over the length of training, as those of base 10,000 do over 8,000 tokens.
_ROPE = Rope(_HEAD, 100.0, Unscaled())
_HILS = Hierarchy(chunk=4, topk=4, window=8)
_NSA = Sparsity(block=4, stride=2, selected=4, count=6, initial=1, local=2, window=8)


@dataclass(frozen=True, slots=True)
class Reach:
    """Trains a layer of each kind for `steps` steps of `rows` rows of `length` tokens; asks it at that length, at four times and at 16."""

    steps: int = 400
    rows: int = 32
    length: int = 64
    asked: int = 64

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {attention, trained_at, length, accuracy, chance, read, found}, over `asked` rows of four questions each.

        `read` is how many tokens a query reads one by one, and `found` the share of questions whose needle is among them for some head.
        """
        if min(self.steps, self.rows, self.asked) < 1 or self.length < 4 * _ASKED:
            raise InputError(f"steps, rows and asked must be at least 1 and the length {4 * _ASKED}: {self}", item="reach")
        rows: list[dict[str, Cell]] = []
        for kind in get_args(Kind):
            with busy(f"training {kind}"):
                layer = self._trained(kind)
            rows += [self._row(layer, kind, times * self.length) for times in (1, 4, 16)]
        return rows

    def _trained(self, kind: Kind) -> "Reader":
        generator = torch.Generator().manual_seed(0)
        reader = Reader(kind, generator)
        optimiser = torch.optim.AdamW(reader.parameters(), lr=3e-3)
        for step in range(self.steps):
            for group in optimiser.param_groups:
                group["lr"] = 3e-3 * min(1.0, (step + 1) / 50) * (1 - step / self.steps)
            ids, values, _ = _questions(self.rows, self.length, generator)
            loss = F.cross_entropy(reader(ids).flatten(0, 1), values.flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return reader

    @torch.no_grad()
    def _row(self, reader: "Reader", kind: Kind, length: int) -> dict[str, Cell]:
        right, found, generator = 0.0, 0.0, torch.Generator().manual_seed(1)
        for rows in [8] * (self.asked // 8) + [self.asked % 8] * (self.asked % 8 > 0):
            ids, values, places = _questions(rows, length, generator)
            right += float((reader(ids).argmax(-1) == values).sum())
            found += float(reader.finds(ids, places).sum())
        questions = self.asked * _ASKED
        read = {"full": length, "hils": _HILS.window + _HILS.topk * _HILS.chunk, "nsa": _NSA.count * _NSA.selected + _NSA.window}[kind]
        accuracy: dict[str, Cell] = {"accuracy": right / questions, "chance": 1 / _VALUES, "read": read, "found": found / questions}
        return {"attention": kind, "trained_at": self.length, "length": length, **accuracy}


class Reader(nn.Module):
    """Tokens to vectors, one layer of attention, and the scores of values at the tokens that ask."""

    def __init__(self, kind: Kind, generator: torch.Generator) -> None:
        super().__init__()
        self.key, self.value, self.ask = nn.Embedding(_KEYS, _WIDTH), nn.Embedding(_VALUES, _WIDTH), nn.Parameter(torch.empty(_WIDTH))
        self.before, self.after = RMSNorm(_WIDTH, 1e-6), RMSNorm(_WIDTH, 1e-6)
        sizes = _WIDTH, _HEADS, _GROUPS, _HEAD
        self.attention: Full | LandmarkAttention | NativeSparseAttention = (
            LandmarkAttention(*sizes, _HILS, _ROPE, rank=16)
            if kind == "hils"
            else NativeSparseAttention(*sizes, _NSA)
            if kind == "nsa"
            else Full()
        )
        self.head = nn.Linear(_WIDTH, _VALUES)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if name.startswith(("key.", "value.", "ask")):
                    weight.normal_(generator=generator)
                elif weight.ndim > 1:
                    weight.normal_(0, weight.shape[1] ** -0.5, generator=generator)

    def forward(self, ids: Int[Tensor, "b s"]) -> Float[Tensor, "b q v"]:
        """Scores of the values that the last tokens ask for."""
        x, positions, cache = self._embedded(ids), torch.arange(ids.shape[1]).expand_as(ids), NoCache()
        cache.advance(positions)
        if isinstance(self.attention, LandmarkAttention):
            seen = self.attention(self.before(x), cache, 0)
        else:
            seen = self.attention(self.before(x), _ROPE(positions, x.dtype), cache, 0)
        out: Tensor = self.head(self.after(x + seen)[:, -_ASKED:])
        return out

    def finds(self, ids: Int[Tensor, "b s"], places: Int[Tensor, "b q"]) -> Tensor:
        """Whether the token at each place is read by the token that asks for it, [b q]."""
        x, positions, cache = self.before(self._embedded(ids)), torch.arange(ids.shape[1]).expand_as(ids), NoCache()
        cache.advance(positions)
        if isinstance(self.attention, LandmarkAttention):
            query, keys, values = self.attention.project(x)
            view = cache.append(0, keys, values)
            _, index = self.attention.choice(query, view, self.attention.near(query, view)[1])
            return _among(index, places, positions, _HILS.chunk, _HILS.window)
        if isinstance(self.attention, NativeSparseAttention):
            query, keys, values = self.attention.project(x, _ROPE(positions, x.dtype))
            view = cache.append(0, keys, values)
            return _among(self.attention.compressed(query, view)[1], places, positions, _NSA.selected, _NSA.window)
        return torch.ones_like(places, dtype=torch.bool)

    def _embedded(self, ids: Int[Tensor, "b s"]) -> Float[Tensor, "b s d"]:
        key, value = ids // _VALUES, ids % _VALUES
        asking = key >= _KEYS
        told = self.key(key.clamp_max(_KEYS - 1)) + self.value(value)
        return torch.where(asking[..., None], self.key(value) + self.ask, told)


class Full(nn.Module):
    """Rotated attention to everything."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(_WIDTH, (_HEADS + 2 * _GROUPS) * _HEAD, bias=False)
        self.o = nn.Linear(_HEADS * _HEAD, _WIDTH, bias=False)

    def forward(self, x: Float[Tensor, "b s d"], rotation: Rotation, cache: NoCache, layer: int) -> Float[Tensor, "b s d"]:
        """As the other layers."""
        query, key, value = self.qkv(x).unflatten(-1, (-1, _HEAD)).transpose(1, 2).split((_HEADS, _GROUPS, _GROUPS), dim=1)
        seen = F.scaled_dot_product_attention(rotation(query), rotation(key), value, is_causal=True, enable_gqa=True)
        out: Tensor = self.o(seen.transpose(1, 2).flatten(2))
        return out


def _among(index: Int[Tensor, "b g s k"], places: Int[Tensor, "b q"], positions: Int[Tensor, "b s"], size: int, window: int) -> Tensor:
    """Whether a place is in one of the blocks that some head reads, or in the window, for the last queries."""
    read = (index[:, :, -_ASKED:] == (places // size)[:, None, :, None]).any(-1).any(1)
    return read | (places > positions[:, -_ASKED:] - window)


def _questions(rows: int, length: int, generator: torch.Generator) -> tuple[Int[Tensor, "b s"], Int[Tensor, "b q"], Int[Tensor, "b q"]]:
    """Rows of tokens that end in questions, the values asked for, and where they stand."""
    count = length - _ASKED
    keys = torch.randint(_NEEDLES, _KEYS, (rows, count), generator=generator)
    values = torch.randint(_VALUES, (rows, count), generator=generator)
    needles = torch.rand(rows, _NEEDLES, generator=generator).argsort(1)[:, :_ASKED]
    places = torch.rand(rows, count, generator=generator).argsort(1)[:, :_ASKED]
    keys.scatter_(1, places, needles)
    ids = torch.cat((keys * _VALUES + values, _KEYS * _VALUES + needles), dim=1)
    return ids, values.gather(1, places), places
