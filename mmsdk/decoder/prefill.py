"""The prompts of a batch through the decoder, into a cache that is as large as each layer needs."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.decoder.spans import Span, between
from mmsdk.decoder.thinning import Cut, Thinned, thin
from mmsdk.decoder.transformer import Decoder
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.types import KVCache

__all__ = ["Laid", "capacities", "prefill_into", "prefilled", "rest_of"]


@dataclass(frozen=True, slots=True)
class Laid:
    """A prompt in front of the decoder: its embeddings, their positions, and what stands where, with the counts after each cut.

    `deep` is added to the stream after the first, the second, ... layer. Where heads turn along several axes, `turns` are the places on
    them, and the first word behind the prompt stands at `following`; there is one of each, or none. `mass` is the logarithm of how many
    tokens each is to count as in attention, of all rows of a batch or of none.
    """

    embeddings: Float[Tensor, "s d"]
    positions: Int[Tensor, " s"]
    spans: tuple[Span, ...]
    deep: tuple[Float[Tensor, "s d"], ...] = ()
    turns: tuple[Int[Tensor, "3 s"], ...] = ()
    following: tuple[Int[Tensor, ""], ...] = ()
    mass: tuple[Float[Tensor, " s"], ...] = ()

    def part(self, start: int, stop: int) -> "Laid":
        """Some of its tokens, of which none is dropped."""
        here, spans = slice(start, stop), between(self.spans, start, stop)
        deep, turns = tuple(added[here] for added in self.deep), tuple(axes[:, here] for axes in self.turns)
        mass = tuple(added[here] for added in self.mass)
        return Laid(self.embeddings[here], self.positions[here], spans, deep, turns, self.following, mass)


def rest_of(row: Laid, known: int) -> Laid:
    """The row without its first `known` tokens, of which the cache knows already; only where nothing is dropped."""
    return row.part(known, len(row.embeddings)) if known else row


def capacities(decoder: Decoder, rows: Sequence[Laid], cuts: Sequence[Cut], room: int) -> list[int]:
    """Tokens that each layer holds of the longest row, with room for `room` more."""
    widths = _widths(rows, cuts)
    return [widths[sum(cut.layer <= layer for cut in cuts)] + room for layer in range(decoder.config.layers)]


def prefilled(decoder: Decoder, rows: Sequence[Laid], cuts: Sequence[Cut], room: int, last: int = 0) -> tuple[Thinned, DenseCache]:
    """Run prompts through the decoder in one pass, into a cache with space for `room` more tokens a row; `last` as in `prefill_into`."""
    config, first, sizes = decoder.config, rows[0].embeddings, capacities(decoder, rows, cuts, room)
    cache = DenseCache.allocate(config.layers, len(rows), config.kv_heads, config.entry, sizes, first.dtype, first.device)
    return prefill_into(decoder, rows, cuts, cache, last=last), cache


def prefill_into(
    decoder: Decoder, rows: Sequence[Laid], cuts: Sequence[Cut], cache: KVCache, chunk: int = sys.maxsize, last: int = 0
) -> Thinned:
    """Run prompts through the decoder into a cache, at most `chunk` tokens of a row at one time.

    Shorter prompts are padded in front, where positions of -1 keep the padding out of sight of everything. Whoever waits for the next token
    alone asks for hidden states of the `last` one: of the others the last layer then only makes keys and values.
    """
    config, first, width = decoder.config, rows[0].embeddings, _widths(rows, cuts)[0]
    embeddings = first.new_zeros(len(rows), width, config.width)
    deep = [torch.zeros_like(embeddings) for _ in range(max(len(row.deep) for row in rows))]
    positions = torch.full((len(rows), width), -1, dtype=torch.int64, device=first.device)
    turns = tuple(positions.new_zeros(3, len(rows), width) for _ in rows[0].turns)
    for place, row in enumerate(rows):
        start = width - len(row.embeddings)
        embeddings[place, start:] = row.embeddings
        positions[place, start:] = row.positions
        for added, own in zip(deep, row.deep, strict=False):
            added[place, start:] = own
        for axes, own in zip(turns, row.turns, strict=True):
            axes[:, place, start:] = own
    if rows[0].mass:
        assert isinstance(cache, DenseCache), "no other cache was to be begun"
        cache.weigh(positions, torch.stack([F.pad(row.mass[0], (width - len(row.embeddings), 0)) for row in rows]))
    run = thin(decoder, embeddings, positions, cache, [row.spans for row in rows], cuts, chunk, deep, turns, last)
    if turns:
        cache.turn(torch.stack([behind for row in rows for behind in row.following]))
    return run


def _widths(rows: Sequence[Laid], cuts: Sequence[Cut]) -> list[int]:
    """Tokens of the longest row at first and after each cut."""
    return [max(sum(span.counts[stage] for span in row.spans) for row in rows) for stage in range(len(cuts) + 1)]
