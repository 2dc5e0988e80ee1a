"""Prefill that drops visual tokens between layers: what a method decided against is neither computed nor cached from there on.

    run = thin(decoder, x, positions, cache, rows, cuts)

Rows of a batch may hold any number of words and visual inputs. How many tokens of each input are left after each cut is known before the
pass, so that all shapes and places are the host's own arithmetic, and the device is only asked which tokens they are.

Letters: b rows of the batch, s tokens of the pass, k of what is left, r asking rows, d width.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.decoder.rope import Rotation
from mmsdk.decoder.sight import reaching
from mmsdk.decoder.spans import Arrangement, Span, arranged, gathered
from mmsdk.decoder.transformer import Decoder, Layer, LayerAttention, SelfAttention
from mmsdk.kv.policy_cache import PolicyCache
from mmsdk.kv.received import received
from mmsdk.kv.slots import placed
from mmsdk.kv.types import KVCache, LayerView
from mmsdk.tokencomp.ranking import top_within
from mmsdk.tokencomp.types import Thinner

__all__ = ["Cut", "Thinned", "thin"]


@dataclass(frozen=True, slots=True)
class Cut:
    """After `layer` layers, `by` says which visual tokens go on."""

    layer: int
    by: Thinner


@dataclass(frozen=True, slots=True)
class Thinned:
    """A pass that dropped tokens: the hidden states of what is left, or of the last columns of that, final norm applied.

    `origin` is the place of each of them in the pass, -1 for padding; `scores` are those that the method gave every token of the pass at
    the first cut that dropped any, zeros where none did; `seconds` is the time of all scoring and choosing.
    """

    hidden: Float[Tensor, "b _ d"]
    origin: Int[Tensor, "b k"]
    scores: Float[Tensor, "b s"]
    seconds: float


@dataclass(frozen=True, slots=True)
class Pause:
    """A decoder between two layers (`mmsdk.tokencomp.types.Between`). `before` is the stream in front of the layer just done.

    `done` and `next` are the layer just done and the one to come, each with the positions of the tokens in it; `turns` are as in
    `Decoder.run`.
    """

    decoder: Decoder
    cache: KVCache
    hidden: Float[Tensor, "b s d"]
    before: Float[Tensor, "b s d"]
    visual: Bool[Tensor, "b s"]
    text: Int[Tensor, "b r"]
    done: tuple[int, Int[Tensor, "b s"]]
    next: tuple[int, Int[Tensor, "b s"]]
    turns: tuple[Int[Tensor, "3 b s"], ...] = ()

    def attention(self, rows: Literal["last", "text"], layer: Literal["done", "next"]) -> Float[Tensor, "b s"]:
        """See `Between`. Of the layer just done the keys are in the cache; those of the next are made here, for its weights alone."""
        stream, (number, positions) = (self.before, self.done) if layer == "done" else (self.hidden, self.next)
        asking = self.text if rows == "text" else self.text[:, -1:]
        at = _pick(positions, asking)
        query, _, _ = self._layer(number).project(*self._given(gathered(stream, asking), at, number, _picked(self.turns, asking)))
        view = self.cache.view(number)
        if layer == "next":
            view = _extended(view, self._keys(stream, positions, number), positions)
        return received(query, at, view)[:, -stream.shape[1] :]

    def _keys(self, x: Float[Tensor, "b s d"], positions: Int[Tensor, "b s"], number: int) -> Float[Tensor, "b g s e"]:
        attention, given = self._layer(number), self._given(x, positions, number, self.turns)
        return attention.keys(*given) if isinstance(attention, SelfAttention) else attention.project(*given)[1]

    def _given(
        self, x: Float[Tensor, "b s d"], positions: Int[Tensor, "b s"], number: int, turns: tuple[Int[Tensor, "3 b s"], ...]
    ) -> tuple[Tensor, Rotation]:
        """What the attention of a layer is given of a stream in front of it."""
        layer = cast(Layer, self.decoder.layers[number])
        return layer.norm1(x), self.decoder.rotation(turns[0] if turns else positions, x.dtype, number)

    def _layer(self, number: int) -> LayerAttention:
        return cast(Layer, self.decoder.layers[number]).attention


def thin(
    decoder: Decoder,
    x: Float[Tensor, "b s d"],
    positions: Int[Tensor, "b s"],
    cache: KVCache,
    rows: Sequence[Sequence[Span]],
    cuts: Sequence[Cut],
    chunk: int = sys.maxsize,
    deep: Sequence[Float[Tensor, "b s d"]] = (),
    turns: tuple[Int[Tensor, "3 b s"], ...] = (),
    last: int = 0,
) -> Thinned:
    """Run prompts through the decoder into `cache`, dropping tokens at the cuts, which ascend.

    Rows are padded in front, as `positions` say by -1; `rows` tells what stands in each. Between two cuts at most `chunk` tokens are run at
    one time. Without cuts this is a plain pass. What `deep` holds for the first layers is added after them, to the tokens still there.
    Where heads turn along three axes, by `turns`, each token keeps its place on them, whatever a cut counts anew.
    Hidden states are those of the `last` so many columns, of all with 0.
    """
    # Taken before the first layer goes ahead: later layers may stand elsewhere, when tokens of an earlier pass were dropped.
    runs, standing = decoder.runs(cache), [cache.next(layer) for layer in range(decoder.config.layers)]

    def through(x: Tensor, own: Tensor, layers: range, last: int) -> tuple[Tensor, Tensor]:
        before = x
        for part in (range(max(run.start, layers.start), min(run.stop, layers.stop)) for run in runs):
            if part:
                here = placed(own, standing[layers.start], standing[part.start])
                reach, wanted = reaching(decoder.config.sees, now.kinds, here), last if part.stop == layers.stop else 0
                x, before = _chunked(decoder, x, here, turns, deep, reach, now.kinds, cache, part, chunk, wanted)
        return x, before

    now, start, told, seconds = arranged(rows, 0, x.device), 0, list[Tensor](), 0.0
    own, origin = positions, torch.arange(x.shape[1], device=x.device).masked_fill(positions < 0, -1)
    for stage, cut in enumerate(cuts, start=1):
        x, before = through(x, own, range(start, cut.layer), 0)
        done, own = placed(own, standing[start], standing[cut.layer - 1]), placed(own, standing[start], standing[cut.layer])
        later = arranged(rows, stage, x.device)
        if later.lengths != now.lengths:
            began, visual = time.perf_counter(), now.kinds > 0
            given = cut.by.score(Pause(decoder, cache, x, before, visual, now.text, (cut.layer - 1, done), (cut.layer, own), turns))
            told.append(given)
            index = chosen(given.masked_fill(~visual, 0), now, later)
            seconds += time.perf_counter() - began
            x, own, origin, turns = gathered(x, index), _pick(own, index), _pick(origin, index), _picked(turns, index)
            deep = [gathered(added, index) for added in deep]
            later = later.holding(_pick(now.kinds, index))
        if cut.by.positions == "compact":
            own = _closed_up(own, standing[cut.layer])
        now, start = later, cut.layer
    x, _ = through(x, own, range(start, decoder.config.layers), last)
    return Thinned(decoder.norm(x[:, -last:]), origin, told[0] if told else torch.zeros_like(positions, dtype=torch.float32), seconds)


def chosen(scores: Float[Tensor, "b s"], now: Arrangement, later: Arrangement) -> Int[Tensor, "b k"]:
    """What goes on, in order and padded in front by -1: all words, and of each visual input as many of the best as `later` has."""
    # Scores are read relative to the largest of the row: noise in the last bits decides nothing, and the earlier of equals stays.
    relative = scores / scores.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
    # Padding is a kind of its own, of which nothing stays.
    stays = top_within(relative, now.kinds + 1, later.stay)
    places = torch.arange(scores.shape[1], device=scores.device).expand_as(now.kinds)
    return places.masked_fill(~stays, -1).sort(dim=1).values[:, -later.width :]


def _chunked(
    decoder: Decoder,
    x: Float[Tensor, "b s d"],
    positions: Int[Tensor, "b s"],
    turns: tuple[Int[Tensor, "3 b s"], ...],
    deep: Sequence[Float[Tensor, "b s d"]],
    reach: tuple[Int[Tensor, "b s"], ...],
    kinds: Int[Tensor, "b s"],
    cache: KVCache,
    layers: range,
    chunk: int,
    last: int,
) -> tuple[Float[Tensor, "b _ w"], Float[Tensor, "b s w"]]:
    """The stream after these layers and before the last of them, a chunk of tokens through all the layers at a time.

    Tokens that see what comes after them go through together.
    """
    step = x.shape[1] if reach else min(chunk, x.shape[1])
    parts = []
    for here in (slice(start, start + step) for start in range(0, x.shape[1], step)):
        axes, added = tuple(one[..., here] for one in turns), [one[:, here] for one in deep]
        if isinstance(cache, PolicyCache):
            cache.hear(kinds[:, here], layers)
        parts.append(decoder.run(x[:, here], positions[:, here], cache, layers, turns=axes, deep=added, reach=reach, last=last))
    if len(parts) == 1:
        return parts[0]
    # of each chunk its own last ones, among which are the last of all
    return torch.cat([after for after, _ in parts], dim=1)[:, -last:], torch.cat([before for _, before in parts], dim=1)


def _extended(view: LayerView, keys: Float[Tensor, "b g s e"], positions: Int[Tensor, "b s"]) -> LayerView:
    """A view as it would be with the keys of new tokens, which stand for the values too: nobody looks at those."""
    if not view.keys.shape[2]:
        # what holds nothing yet need not know how many rows there will be
        return LayerView(keys, keys, positions, positions >= 0, (positions >= 0).sum(1))
    valid = torch.cat((view.valid, positions >= 0), dim=1)
    keys, positions = torch.cat((view.keys, keys), dim=2), torch.cat((view.positions, positions), dim=1)
    return LayerView(keys, keys, positions, valid, valid.sum(1))


def _pick(values: Int[Tensor, "b s"], index: Int[Tensor, "b k"]) -> Int[Tensor, "b k"]:
    return values.gather(1, index.clamp_min(0)).masked_fill(index < 0, -1)


def _picked(turns: tuple[Int[Tensor, "3 b s"], ...], index: Int[Tensor, "b k"]) -> tuple[Int[Tensor, "3 b k"], ...]:
    """The positions on all axes of the tokens at these places; those of padding (-1) are any."""
    return tuple(axes.gather(2, index.clamp_min(0).expand(3, -1, -1)) for axes in turns)


def _closed_up(positions: Int[Tensor, "b k"], start: Int[Tensor, " b"]) -> Int[Tensor, "b k"]:
    """The same order without gaps, from `start` on."""
    real = positions >= 0
    return torch.where(real, start[:, None] + real.cumsum(dim=1) - 1, positions)
