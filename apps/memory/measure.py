"""A prompt is read once, and every memory is given what the decoder made of it: keys, values, queries, layer by layer.

What a memory holds of a prompt depends on nothing else, as prompts are attended to exactly until they have been read. So the pass through
the model, which costs most, is shared by all policies and budgets, and each of them is left with its own work.
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.apps.memory.asked import Asked
from mmsdk.decoder.transformer import Decoder
from mmsdk.kv.entries import Arriving
from mmsdk.kv.policies.full import Full
from mmsdk.kv.policy import Amount, Ask, KVPolicy, LayerStore, Storer
from mmsdk.kv.policy_cache import PolicyCache
from mmsdk.kv.shelf import Shelf
from mmsdk.kv.turning import Turning
from mmsdk.kv.types import LayerView

__all__ = ["Measured", "Prompted", "Reading", "filled", "measured", "prompted"]


@dataclass(frozen=True, slots=True)
class Silent:
    """What a decoder lends to the memory of a layer (`mmsdk.kv.policy.Ask`), where nobody wants the attention's outcome."""

    ask: Ask

    @property
    def positions(self) -> Int[Tensor, "b s"]:
        """See `Ask`."""
        return self.ask.positions

    @property
    def places(self) -> Int[Tensor, "b s"]:
        """See `Ask`."""
        return self.ask.places

    @property
    def window(self) -> int:
        """See `Ask`."""
        return self.ask.window

    @property
    def turning(self) -> Turning:
        """See `Ask`."""
        return self.ask.turning

    def attend(self, query: Float[Tensor, "n h s d"], view: LayerView) -> Float[Tensor, "n h s d"]:
        """The query itself: nobody looks."""
        return query

    def unturned(self, query: Float[Tensor, "b h s d"]) -> Float[Tensor, "b h s d"]:
        """See `Ask`."""
        return self.ask.unturned(query)

    def row(self, place: int) -> "Silent":
        """See `Ask`."""
        return Silent(self.ask.row(place))


@dataclass(frozen=True, slots=True)
class Part:
    """What one layer made of a prompt."""

    query: Float[Tensor, "b h s d"]
    keys: Float[Tensor, "b g s d"]
    values: Float[Tensor, "b g s d"]
    ask: Silent


@dataclass(frozen=True, slots=True)
class Prompted:
    """A prompt that was read: what each layer made of it."""

    parts: tuple[Part, ...]
    kinds: Int[Tensor, "1 s"]

    @property
    def length(self) -> int:
        """Tokens of it."""
        return self.kinds.shape[1]


class Recorder:
    """A store that keeps a layer's queries beside what it attends to exactly. A prompt goes into it at one time."""

    nbytes = span = read_bytes = 0

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._shelf = Shelf(Full(), 1.0, 0, 1)

    @property
    def lengths(self) -> Int[Tensor, "b q"]:
        """See `LayerStore`."""
        return self._shelf.lengths

    def append(self, new: Arriving, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"]) -> None:
        """See `LayerStore`."""
        self._shelf.append(new, keys, values)

    def attend(self, query: Float[Tensor, "b h s d"], ask: Ask) -> Float[Tensor, "b h s d"]:
        """See `LayerStore`."""
        self.parts.append(Part(query, self._shelf.entries.keys, self._shelf.entries.values, Silent(ask)))
        return self._shelf.attend(query, ask)

    def settle(self) -> None:
        """Everything stays."""

    def view(self) -> LayerView:
        """See `LayerStore`."""
        return self._shelf.view()

    def keep(self, index: Int[Tensor, "b k"]) -> None:
        """See `LayerStore`."""
        self._shelf.keep(index)

    def select(self, rows: Int[Tensor, " r"]) -> LayerStore:
        """See `LayerStore`: what goes on from it records nothing."""
        return self._shelf.select(rows)

    def fork(self) -> LayerStore:
        """See `LayerStore`: what goes on from it records nothing."""
        return self._shelf.fork()


@torch.no_grad()
def prompted(decoder: Decoder, asked: Asked) -> Prompted:
    """Read a prompt."""
    stores = [Recorder() for _ in range(decoder.config.layers)]
    length = asked.prompt.shape[1]
    cache = PolicyCache.empty(stores, 1, asked.prompt.device)
    decoder(asked.prompt, torch.arange(length, device=asked.prompt.device)[None], cache)
    return Prompted(tuple(part for store in stores for part in store.parts), asked.kinds)


@torch.no_grad()
def filled(policy: KVPolicy, amounts: Sequence[Amount], prompt: Prompted) -> list[PolicyCache]:
    """The memory of a prompt by a policy, at each of these amounts; what a policy notes while it reads is shared where it can be."""
    depth, device = len(prompt.parts), prompt.parts[0].keys.device
    positions = torch.arange(prompt.length, device=device)[None]
    if isinstance(policy, Storer):
        caches = [PolicyCache.empty([policy.store(layer, depth, amount) for layer in range(depth)], 1, device) for amount in amounts]
        for cache in caches:
            _replay(cache, positions, prompt)
    else:
        noted = [_shelf(policy, 1.0, layer, depth) for layer in range(depth)]
        _replay(PolicyCache.empty(noted, 1, device), positions, prompt)
        caches = [_sharing(amount, noted, positions) for amount in amounts]
    for cache in caches:
        cache.settle()
    return caches


def _shelf(policy: KVPolicy, amount: Amount, layer: int, depth: int) -> Shelf:
    assert not isinstance(policy, Storer), "it brings its own store"
    return Shelf(policy if layer >= policy.dense else Full(), amount, layer, depth)


def _replay(cache: PolicyCache, positions: Int[Tensor, "1 s"], prompt: Prompted) -> None:
    cache.advance(positions)
    cache.hear(prompt.kinds)
    for layer, part in enumerate(prompt.parts):
        cache.attend(layer, part.query, part.keys, part.values, part.ask)


def _sharing(amount: Amount, noted: Sequence[Shelf], positions: Int[Tensor, "1 s"]) -> PolicyCache:
    """A cache of another amount with the same entries and notes."""
    cache = PolicyCache.empty([one.under(amount) for one in noted], 1, positions.device)
    cache.advance(positions)
    return cache


@dataclass(frozen=True, slots=True)
class Reading:
    """What came of an answer: its score, the seconds and the number of the tokens that were read one by one, and bytes."""

    quality: float
    seconds: float
    tokens: int
    held: int
    read: int


@torch.no_grad()
def measured(decoder: Decoder, cache: PolicyCache, asked: Asked) -> Reading:
    """Read the cue and the answer token by token, as they would be said. `held` are bytes in the end, `read` those of the last token."""
    words = torch.tensor([[*asked.cue, *asked.answer[:-1]]], device=asked.prompt.device)
    embedded, hidden = decoder.embed(words), list[Tensor]()
    started = time.perf_counter()
    for place in range(words.shape[1]):
        hidden.append(decoder(embedded[:, place : place + 1], cache.position[:, None], cache)[0])
    seconds = time.perf_counter() - started
    scores = decoder.logits(torch.cat(hidden[len(asked.cue) - 1 :])).log_softmax(-1)
    wanted = torch.tensor(asked.answer, device=scores.device)
    right = scores.argmax(-1) == wanted
    quality = {
        "likelihood": math.exp(float(scores.gather(1, wanted[:, None]).mean())),
        "words": float(right.float().mean()),
        "whole": float(right.all()),
    }[asked.score]
    return Reading(quality, seconds, words.shape[1], cache.nbytes, cache.read_bytes)


@dataclass(frozen=True, slots=True)
class Measured:
    """The mean over readings; speeds and bytes are those of all of them together."""

    quality: float
    held: float
    read: float
    tok_s: float

    @staticmethod
    def of(readings: Sequence[Reading]) -> "Measured":
        """At least one."""
        count = len(readings)
        sums = [sum(dataclasses.astuple(one)[place] for one in readings) for place in range(5)]
        return Measured(sums[0] / count, sums[3] / count, sums[4] / count, sums[2] / max(sums[1], 1e-9))
