"""The adapters of a pipeline: loaded by name, chosen by each request, one alone or several by weight.

    pipe.load_adapter("path/to/adapter", name="style")
    pipe("photo.jpg", "What is it?", adapter="style")
    pipe("photo.jpg", "What is it?", adapter={"style": 1.0, "domain": 0.5})
    pipe([("a.jpg", "What?"), ("b.jpg", "What?")], adapter=["style", ""])      # each row its own; "" is the model as it is

What was remembered of a prompt holds for the adapters that it was read with and for no others (`Worn.key`). An adapter may change what
sees, too: pictures are then encoded by a tower with the update in its weights, and what was encoded by another is not taken for theirs
(`Worn.eye`, whose model has another name).
"""

import difflib
import math
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from threading import Lock
from types import MappingProxyType
from typing import Any, cast

from torch import nn

from mmsdk.decoder.adapted import Adapter, Stack, merged, updated, wear
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError
from mmsdk.kv.prefix import digest
from mmsdk.models.types import VLM, Connected
from mmsdk.vision.values import real, shown
from mmsdk.weights.hub import resolve
from mmsdk.weights.peft import CONFIG, TENSORS, read_adapter
from mmsdk.weights.peft_sight import rebuilt, sees

__all__ = ["AdapterSpec", "Adapters", "Worn"]

AdapterSpec = str | Mapping[str, int | float] | None
"""An adapter by its name, or several, each with its weight; "", {} and None are the model as it is."""


class Eyes:
    """Models that see with adapters in their weights, by the adapters. Of loaded ones, the last few that were asked for are kept.

    For several threads: who asks for one that is just being made waits for it.
    """

    def __init__(self, most: int = 4) -> None:
        self._made: dict[tuple[tuple[bytes, float], ...], VLM] = {}
        self._loaded: frozenset[bytes] = frozenset()
        self._most, self._lock = most, Lock()

    def __deepcopy__(self, memo: dict[int, object]) -> "Eyes":
        """For the same adapters, and none made yet."""
        other = Eyes(self._most)
        other._loaded = self._loaded
        return other

    def of(self, vlm: VLM, stack: Stack) -> VLM:
        """The model whose encoder and projector have these in their weights, under a name of its own; the model itself without any."""
        looks = tuple((adapter, weight) for adapter, weight in stack if adapter.sight)
        if not looks:
            return vlm
        key = tuple((adapter.key, weight) for adapter, weight in looks)
        with self._lock:
            made = self._made.pop(key, None) or _looking(vlm, looks, digest(*_told(looks)).hex()[:12])
            if self._loaded.issuperset(adapter.key for adapter, _ in looks):
                self._made[key] = made
            while len(self._made) > self._most:
                del self._made[next(iter(self._made))]
            return made

    def keep(self, adapters: Iterable[Adapter]) -> None:
        """From now on these are the loaded ones; models with others in their weights are let go."""
        with self._lock:
            self._loaded = frozenset(adapter.key for adapter in adapters)
            self._made = {key: vlm for key, vlm in self._made.items() if self._loaded.issuperset(adapter for adapter, _ in key)}


@dataclass(frozen=True, slots=True)
class Worn:
    """The adapters of each row of a batch, by its place; without any entry no row has any. `mark` tells what they are worn over."""

    stacks: tuple[Stack, ...] = ()
    mark: bytes = b""
    eyes: Eyes = field(default_factory=Eyes, compare=False)

    def eye(self, vlm: VLM, row: int) -> VLM:
        """What a row's pictures are looked at with: `vlm` itself where no adapter of the row changes that."""
        return self.eyes.of(vlm, self.stacks[row]) if self.stacks else vlm

    def decoder(self, plain: Decoder, rows: Sequence[int]) -> Decoder:
        """The decoder for these rows, in their order; `plain` itself where none of them has an adapter."""
        return wear(plain, [self.stacks[row] for row in rows]) if self.stacks else plain

    def key(self, row: int) -> bytes:
        """What the memory of a row's prompt hangs on, besides the prompt: nothing for the model as it is."""
        stack = self.stacks[row] if self.stacks else ()
        return digest(self.mark, *_told(stack)) if stack else self.mark


@dataclass(slots=True)
class Adapters:
    """Adapters by name, for one decoder. Loading one changes nothing for calls that are under way."""

    mark: bytes = b""
    _eyes: Eyes = field(default_factory=Eyes)
    _known: Mapping[str, Adapter] = field(default_factory=lambda: MappingProxyType({}))

    def __deepcopy__(self, memo: dict[int, object]) -> "Adapters":
        """The same adapters, which are values; loading and unloading changes one of the two alone."""
        return Adapters(self.mark, deepcopy(self._eyes, memo), self._known)

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are loaded, in their order."""
        return tuple(self._known)

    def load(self, path: str | os.PathLike[str], name: str, vlm: VLM) -> None:
        """Read an adapter from a folder, or "org/name" on the hub, and know it by `name`, in the place of one that had it before.

        Raises InputError for a name that cannot be, WeightsError and ModelError as `mmsdk.weights.peft.read_adapter` does.
        """
        if not isinstance(name, str) or not name.strip() or len(name) > 200:
            raise InputError(f"{shown(name)} is no name for an adapter", item="adapter")
        if not isinstance(path, str | os.PathLike) or not os.fsdecode(path).strip():
            raise InputError(f'{shown(path)} is no place of an adapter; write a folder, or "org/name"', item="adapter")
        folder = resolve(os.fsdecode(path), [CONFIG, TENSORS])
        sight = _sight(vlm)
        updates, there = read_adapter(folder, vlm.decoder, sight), {module for module, _ in sight.named_modules()}
        words = {module: update for module, update in updates.items() if module not in there}
        looks = {module: update for module, update in updates.items() if module in there}
        adapter = Adapter(name, secrets.token_bytes(16), MappingProxyType(words), MappingProxyType(looks))
        self._know({**self._known, name: adapter})

    def unload(self, name: str) -> None:
        """Forget one, and what sees with it; answers under way keep it to their end. Raises InputError for a name that is not known."""
        self._find(name)
        self._know({known: adapter for known, adapter in self._known.items() if known != name})

    def worn(self, spec: AdapterSpec | Sequence[AdapterSpec], rows: int) -> Worn:
        """What so many rows wear: all the same, or a list of what each does. Raises InputError, naming the item, for what cannot be."""
        stacks = [self.stack(one) for one in spec] if isinstance(spec, list | tuple) else [self.stack(cast(AdapterSpec, spec))] * rows
        if len(stacks) != rows:
            raise InputError(f"it names {len(stacks)} for {rows} rows; name one for each, or one for all", item="adapter")
        return Worn(tuple(stacks) if any(stacks) else (), self.mark, self._eyes)

    def stack(self, spec: AdapterSpec) -> Stack:
        """Adapters by their names. Raises InputError for a name that is not known, a weight that is no number, and a weighted DoRA."""
        spec = "" if spec is None else spec
        if not isinstance(spec, str | Mapping):
            raise InputError(f'{shown(spec)} names no adapter; write "a", or {{"a": 1.0, "b": 0.5}}', item="adapter")
        weights = {spec: 1.0} if isinstance(spec, str) and spec else {} if isinstance(spec, str) else spec
        found = [(self._find(name), real(weight)) for name, weight in weights.items()]
        for adapter, weight in found:
            if not math.isfinite(weight):
                raise InputError(f"{shown(weights[adapter.name])} is no weight for {adapter.name!r}", item="adapter")
            if weight != 1 and any(update.factor for update in (*adapter.updates.values(), *adapter.sight.values())):
                raise InputError(
                    f"{adapter.name!r} is a DoRA adapter, which is taken whole: its weight is 1, not {weight:g}", item="adapter"
                )
        return tuple(found)

    def merged(self, spec: AdapterSpec, vlm: VLM) -> tuple[VLM, "Adapters"]:
        """The model with adapters in its weights, and what knows adapters for it: none yet. Raises as `stack` and `decoder.merged` do."""
        stack = self.stack(spec)
        # every family's model is a dataclass with this field
        other: VLM = replace(cast(Any, self._eyes.of(vlm, stack)), decoder=merged(vlm.decoder, stack))
        return other, Adapters(Worn((stack,), self.mark).key(0))

    def _know(self, adapters: dict[str, Adapter]) -> None:
        self._known = MappingProxyType(adapters)
        self._eyes.keep(adapters.values())

    def _find(self, name: object) -> Adapter:
        if isinstance(name, str) and name in self._known:
            return self._known[name]
        close = difflib.get_close_matches(name, self._known, n=1) if isinstance(name, str) else []
        there = f"there is {', '.join(self._known) or 'none'}: pipe.load_adapter(path, name) adds one"
        there = f"did you mean {close[0]!r}?" if close else there
        raise InputError(f"no adapter {shown(name)} is loaded; {there}", item="adapter")


def _told(stack: Stack) -> list[bytes]:
    """Adapters and their weights, to be digested."""
    return [part for adapter, weight in stack for part in (adapter.key, repr(weight).encode())]


def _sight(vlm: VLM) -> nn.ModuleDict:
    """What sees in a model that was put together from a checkpoint; nothing in one that ships here."""
    return sees(vlm.encoder, vlm.connector) if isinstance(vlm, Connected) else nn.ModuleDict()


def _looking(vlm: VLM, looks: Stack, mark: str) -> VLM:
    assert isinstance(vlm, Connected), "an adapter has updates of these alone"
    parts = updated(_sight(vlm), [(adapter.sight, weight) for adapter, weight in looks])
    encoder, connector = rebuilt(vlm.encoder, vlm.connector, dict(parts.items()))
    names = " and ".join(adapter.name for adapter, _ in looks)
    # every family's model is a dataclass with these fields
    other: VLM = replace(cast(Any, vlm), name=f"{vlm.name} with {names} ({mark})", encoder=encoder, connector=connector)
    return other
