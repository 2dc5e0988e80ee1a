"""Causal generation: chunk after chunk of frames, each from noise, with the keys and values of the chunks before it.

As From Slow Bidirectional to Fast Autoregressive Video Diffusion Models (arXiv 2412.07772) has it: frames of a chunk see one another and
all that came before; once a chunk is clean it is passed through the model once more, at time 0, and what its layers then hold is
remembered.
"""

from collections.abc import Iterable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.diffusion.caching import Caching, StepCache, step_cache
from mmsdk.diffusion.generate import Denoiser
from mmsdk.diffusion.guidance import Distilled, Guidance
from mmsdk.diffusion.schedule import Schedule
from mmsdk.diffusion.types import Condition, Transformer
from mmsdk.diffusion.world.memory import WorldMemory

__all__ = ["denoised", "remember", "rollout"]


def rollout(
    model: Transformer,
    shape: tuple[int, int, int, int, int],
    conditions: Iterable[Condition],
    schedule: Schedule,
    memory: WorldMemory,
    generator: torch.Generator,
    guidance: Guidance = Distilled(),
    cache: str | StepCache = "none",
) -> Iterator[Float[Tensor, "b c f h w"]]:
    """A chunk of `shape` for each condition, for as long as there are any: what comes next may be decided after what came is seen."""
    first, like = 0, model.like
    for condition in conditions:
        noise = torch.randn(shape, generator=generator, device=generator.device).to(like)
        denoiser = Denoiser(model, condition, guidance, schedule.steps, memory, Caching(step_cache(cache)), first)
        latents = denoised(denoiser, noise, schedule)
        remember(model, latents, condition, memory, first, guidance)
        first += model.grid(latents).frames
        yield latents


@torch.no_grad()
def remember(
    model: Transformer,
    latents: Float[Tensor, "b c f h w"],
    condition: Condition,
    memory: WorldMemory,
    first: int = 0,
    guidance: Guidance = Distilled(),
) -> Float[Tensor, "b e f h w"]:
    """Make a clean chunk whose first frame is `first` part of the memory; returns the velocity that the model saw in it with the text."""
    time = torch.zeros(len(latents), device=latents.device)
    predicted = [model(latents, time, given, memory.writing(branch), first=first) for branch, given in guidance.passes(condition)]
    memory.prefetch()
    out: Tensor = predicted[0]
    return out


@torch.no_grad()
def denoised(denoiser: Denoiser, latents: Float[Tensor, "b c f h w"], schedule: Schedule) -> Float[Tensor, "b c f h w"]:
    """All steps of a schedule, from noise."""
    for step in range(schedule.steps):
        latents = schedule.step(latents, denoiser.velocity(latents, schedule.time(step), step), step)
    return latents
