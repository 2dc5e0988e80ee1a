"""Policies of the memory by name ("snapkv:0.25,window=32"), as something that a pipeline's caches come from."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mmsdk import plugins
from mmsdk.errors import BudgetError, InputError, PluginError
from mmsdk.kv.abreast import Abreast
from mmsdk.kv.policies.full import Full
from mmsdk.kv.policy import Amount, Evictor, InStep, KVPolicy, LayerStore, Mover, OfLatents, Reader, Storer
from mmsdk.kv.policy_cache import PolicyCache
from mmsdk.kv.scoring import amount_of, checked
from mmsdk.kv.shape import Shape
from mmsdk.kv.shelf import Shelf
from mmsdk.kv.types import KVCache

__all__ = ["POLICIES", "PolicyMemory", "policy_of"]

POLICIES = "mmsdk.kv.policies"


@dataclass(frozen=True, slots=True)
class PolicyMemory:
    """Prompts are read whole, then each layer keeps `amount` of them, as `policy` says; nothing is remembered between calls.

    Raises BudgetError for an amount that is impossible for any prompt, and for a count no larger than the first tokens that always stay.
    """

    policy: KVPolicy
    amount: Amount

    def __post_init__(self) -> None:
        checked(self.amount)
        for knob in ("dense", "interval"):
            value = getattr(self.policy, knob, 0)
            if value < 0:
                raise PluginError(f"{self.name}: {knob} is {value}, it must be at least 0")
        sinks = getattr(self.policy, "sinks", 0) if isinstance(self.policy, Evictor) else 0
        if isinstance(self.amount, int) and self.amount <= sinks:
            told = f"{self.name}:{self.amount} has no room beside its first tokens (sinks={sinks})"
            raise BudgetError(f"{told}; keep at least {sinks + 1}, or lower sinks")

    @property
    def name(self) -> str:
        """The policy's, in messages."""
        return type(self.policy).__name__.lower()

    @property
    def page(self) -> int:
        """Nothing can be found again."""
        return 0

    @property
    def chunk(self) -> int:
        """Prompts go through whole."""
        return sys.maxsize

    def begin(
        self, shape: Shape, capacities: Sequence[int], keys: Sequence[Sequence[bytes]], copies: int = 1, room: int = 0
    ) -> tuple[KVCache, list[int]]:
        """See `mmsdk.kv.memory.Memory`. Raises InputError for latents, where a policy judges or moves keys and values of heads."""
        if not isinstance(shape.head_dim, int) and len(set(shape.head_dim)) > 1:
            self._check_latents(shape.head_dim[1])
        return self.cache(shape.layers, len(keys), shape.device), [0] * len(keys)

    def cache(self, layers: int, rows: int, device: torch.device | str) -> PolicyCache:
        """An empty cache for a decoder of so many layers. `PolicyCache.settle` is to be called when a prompt has been read.

        Raises BudgetError where `dense` is all of its layers, so that nothing would ever go.
        """
        dense = self.policy.dense if isinstance(self.policy, Evictor) else 0
        if 0 < layers <= dense:
            told = f"{self.name}: dense={dense} keeps everything in all {layers} layers of this model"
            raise BudgetError(f"{told}; write dense below {layers}")
        return PolicyCache.empty([self._store(layer, layers) for layer in range(layers)], rows, device)

    def learn(self, cache: KVCache, keys: Sequence[Sequence[bytes]]) -> None:
        """The prompts have been read: what is above the budget goes."""
        assert isinstance(cache, PolicyCache), "a memory is taught by its own caches"
        if isinstance(self.policy, InStep) and len(cache.position) > 1:
            # beside a longer one a row would keep another amount than alone
            rows = torch.arange(len(cache.position), device=cache.position.device)
            cache.rehouse([Abreast.of(store, rows) for store in cache.stores])
        cache.settle()

    def _check_latents(self, indexed: int) -> None:
        """`indexed` is the width of an indexer's keys, which stand in the place of values."""
        if not isinstance(self.policy, OfLatents):
            able = ", ".join(name for name in plugins.available(POLICIES) if isinstance(plugins.load(POLICIES, name), OfLatents))
            told = f"{self.name} judges keys and values of heads, and this model keeps latents"
            raise InputError(f"{told}; choose one of {able}, or dense or paged", item="kv")
        if isinstance(self.policy, Mover) and indexed:
            raise InputError(f"{self.name} moves keys, and those of this model's indexer cannot be moved; choose window", item="kv")

    def _store(self, layer: int, depth: int) -> LayerStore:
        if isinstance(self.policy, Storer):
            return self.policy.store(layer, depth, self.amount)
        return Shelf(self.policy if layer >= self.policy.dense else Full(), self.amount, layer, depth)


def policy_of(text: str) -> PolicyMemory:
    """The memory that "name:amount,knob=value" asks for; "full" alone needs no amount.

    Raises PluginError for an unknown policy or knob, BudgetError for an amount that is missing, no number or impossible.
    """
    asked = plugins.parse(text)
    policy = plugins.build(POLICIES, asked)
    if not isinstance(policy, Evictor | Reader | Storer):
        raise PluginError(f"{asked.name!r} in {POLICIES} is no policy: it is none of Evictor, Reader and Storer")
    if not asked.amount and not isinstance(policy, Full):
        name = asked.name
        raise BudgetError(f'{text!r} does not say how much to keep: write "{name}:512" for a count of tokens or "{name}:0.25" for a share')
    return PolicyMemory(policy, amount_of(asked.amount or "1.0", text))
