"""From noise to a clip of latents: the steps of a schedule, each as many passes of the model as the guidance takes.

    clip = generate(model, noise, condition, flow(30, shift=3.0), guidance, attention="svg2", cache="first_block:0.05")

Sparse attention and step caches compose. Both keep something from step to step, in objects made anew for each generation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.diffusion.attending import Attending, attending
from mmsdk.diffusion.attention.types import Selector
from mmsdk.diffusion.caching import Caching, StepCache, step_cache
from mmsdk.diffusion.guidance import Distilled, Guidance
from mmsdk.diffusion.schedule import Schedule
from mmsdk.diffusion.types import Condition, Transformer
from mmsdk.errors import InputError

__all__ = ["Cost", "Denoiser", "Generated", "generate", "to_nobody"]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a generation took: passes of the model, tokens in all of them, and passes of each branch whose layers a cache spared."""

    passes: int
    tokens: int
    skipped: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Generated:
    """A clip of latents and what it cost."""

    latents: Float[Tensor, "b c f h w"]
    cost: Cost


class Denoiser:
    """One generation at one size: the model with a text, its guidance, and the state of attention and cache. Made anew for each."""

    def __init__(
        self, model: Transformer, condition: Condition, guidance: Guidance, steps: int, attention: Attending, cache: Caching, first: int = 0
    ) -> None:
        self._model, self._passes, self._guidance = model, guidance.passes(condition), guidance
        self._steps, self._attention, self._cache, self._first = steps, attention, cache, first
        self._count = self._tokens = 0

    @property
    def cost(self) -> Cost:
        """So far."""
        return Cost(self._count, self._tokens, self._cache.skipped)

    def velocity(self, latents: Float[Tensor, "b c f h w"], time: float, step: int) -> Float[Tensor, "b c f h w"]:
        """What the model, guided, predicts at a step."""
        times = torch.full((len(latents),), time, device=latents.device)
        predicted = []
        for branch, condition in self._passes:
            if len(condition.text) != len(latents):
                raise InputError(f"{len(condition.text)} rows for {len(latents)} clips: each clip has its own", item="condition")
            attend, through = self._attention.at(step, self._steps, branch), self._cache.at(step, self._steps, branch)
            predicted.append(self._model(latents, times, condition, attend, through, self._first))
            self._count += 1
            self._tokens += self._model.grid(latents).video * len(latents)
        return self._guidance.combined(predicted)


def to_nobody(step: int) -> None:
    """Tells nobody."""


@torch.no_grad()
def generate(
    model: Transformer,
    noise: Float[Tensor, "b c f h w"],
    condition: Condition,
    schedule: Schedule,
    guidance: Guidance = Distilled(),
    attention: str | Selector = "dense",
    cache: str | StepCache = "none",
    advance: Callable[[int], None] = to_nobody,
) -> Generated:
    """A clip from noise. `attention` and `cache` are files of their folders, with knobs, or objects; `advance` is told each step done.

    Raises InputError for latents that the model does not take, PluginError for unknown methods.
    """
    denoiser = Denoiser(model, condition, guidance, schedule.steps, attending(attention), Caching(step_cache(cache)))
    latents = noise
    for step in range(schedule.steps):
        latents = schedule.step(latents, denoiser.velocity(latents, schedule.time(step), step), step)
        advance(step + 1)
    return Generated(latents, denoiser.cost)
