"""Inputs of one shape side by side: a method plans for all of them at once, and the plan is applied to each by itself.

Selection is batched; what is gathered, summed or averaged in the end is computed per input, so that an input comes out the same to the
last bit whatever stands beside it.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.plan import check, keep, merge
from mmsdk.tokencomp.types import Audit, Compressed
from mmsdk.vision.types import VisualTokens

__all__ = ["Stack", "in_stacks"]


@dataclass(frozen=True, slots=True)
class Stack:
    """b inputs of n tokens each on one grid, of which `count` < n are to stay. `places` are their places in the batch they came in.

    `query` are the embeddings of what each of them is asked about, none at all where nothing is.
    """

    method: str
    places: tuple[int, ...]
    items: tuple[VisualTokens, ...]
    count: int
    started: float
    query: tuple[Float[Tensor, "_ d"], ...] = ()

    @property
    def grid(self) -> tuple[int, int, int]:
        """(t, h, w) of every input."""
        return self.items[0].grid

    def features(self) -> Float[Tensor, "b n d"]:
        """The tokens as they are."""
        return torch.stack([item.features for item in self.items])

    def positions(self) -> Int[Tensor, "b n 3"]:
        """(t, y, x) of each token."""
        return torch.stack([item.positions for item in self.items])

    def saliency(self) -> Float[Tensor, "b n"]:
        """The encoder's attention to each token, in float32. Raises InputError where the encoder gave none."""
        if self.items[0].saliency.shape[0] == 0:
            raise self._missing("saliency", "the encoder's attention")
        return torch.stack([item.saliency.float() for item in self.items])

    def keys(self) -> Float[Tensor, "b n e"]:
        """The encoder's keys of each token. Raises InputError where the encoder gave none."""
        keys = [item.keys for item in self.items if item.keys is not None]
        if not keys:
            raise self._missing("keys", "the encoder's keys")
        return torch.stack(keys)

    def keep(self, index: Int[Tensor, "b m"], scores: Float[Tensor, "b n"] | None = None) -> list[Compressed]:
        """Keep the tokens at `index` of each input as they are; see `plan.keep`."""
        seconds = self._share()
        return [
            keep(item, index[i], method=self.method, scores=None if scores is None else scores[i], seconds=seconds)
            for i, item in enumerate(self.items)
        ]

    def merge(
        self,
        labels: Int[Tensor, "b n"],
        at: Int[Tensor, "b m"],
        features: Sequence[Float[Tensor, "m d"]] | None = None,
        scores: Float[Tensor, "b n"] | None = None,
    ) -> list[Compressed]:
        """Merge the groups of each input, each at the place of its token `at`; see `plan.merge`."""
        seconds = self._share()
        return [
            merge(
                item,
                labels[i],
                self.count,
                method=self.method,
                scores=None if scores is None else scores[i],
                seconds=seconds,
                at=at[i],
                features=None if features is None else features[i],
            )
            for i, item in enumerate(self.items)
        ]

    def _share(self) -> float:
        """Seconds of planning for each input."""
        return (time.perf_counter() - self.started) / len(self.items)

    def _missing(self, item: str, what: str) -> InputError:
        return InputError(
            f"{self.method} needs {what}, and these tokens come without; choose a method that reads features alone, such as simplecluster",
            item=item,
            index=self.places[0],
        )


def in_stacks(
    method: str,
    tokens: Sequence[VisualTokens],
    budgets: Sequence[Budget],
    plan: Callable[[Stack], list[Compressed]],
    query: Sequence[Float[Tensor, "_ d"]] | None = None,
) -> list[Compressed]:
    """Compress a batch, inputs of equal shape, grid and budget together; an input that is to keep everything comes back as it is.

    Raises BudgetError, naming the item, for a budget that cannot be met, InputError where there is not one question for each input.
    """
    check(tokens, budgets, query)
    done: dict[int, Compressed] = {}
    alike: dict[object, list[int]] = defaultdict(list)
    for i, (item, budget) in enumerate(zip(tokens, budgets, strict=True)):
        if budget.count == len(item):
            done[i] = _whole(method, item)
        else:
            alike[_shape(item), budget.count].append(i)
    for places in alike.values():
        items, asked = tuple(tokens[i] for i in places), tuple(query[i] for i in places) if query else ()
        stack = Stack(method, tuple(places), items, budgets[places[0]].count, time.perf_counter(), asked)
        done.update(zip(places, plan(stack), strict=True))
    return [done[i] for i in range(len(tokens))]


def _shape(item: VisualTokens) -> tuple[object, ...]:
    features, keys = item.features, item.keys
    return features.shape, features.dtype, features.device, item.grid, item.saliency.shape, None if keys is None else keys.shape


def _whole(method: str, item: VisualTokens) -> Compressed:
    device = item.features.device
    return Compressed(item, Audit(method, torch.arange(len(item), device=device), torch.zeros(len(item), device=device)))
