"""Two stages: early steps at a low resolution settle what is where, the last ones at the full resolution refine it.

MiniMax-H3 (abstract, and diffusers' modular pipeline). Published: a scheduler across resolutions with a learned map between latents,
without decoding and encoding. The recipe is our reconstruction: the low stage predicts a clean clip, it is resized, noise is put back to
the sigma that the last steps of the full resolution begin at, z = (1 - s) up(x) + s noise, and those steps are taken.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.diffusion.attending import attending
from mmsdk.diffusion.attention.types import Selector
from mmsdk.diffusion.caching import Caching, StepCache, step_cache
from mmsdk.diffusion.generate import Cost, Denoiser, Generated, to_nobody
from mmsdk.diffusion.guidance import Distilled, Guidance
from mmsdk.diffusion.schedule import Schedule
from mmsdk.diffusion.types import Condition, Transformer
from mmsdk.diffusion.upscale import bilinear
from mmsdk.errors import InputError

__all__ = ["Stages", "Upscaler", "generate_in_two_stages", "snapped"]

Upscaler = Callable[[Tensor, tuple[int, int]], Tensor]


@dataclass(frozen=True, slots=True)
class Stages:
    """Schedules of both sizes, of which the high one's `last` steps are taken; a low row or column is `factor` high ones.

    The low stage ends as soon as it is as clean as those steps begin, and its clip is what it expects then; `to_the_end`, it takes all its
    steps. With all the high steps there is no low stage; with none, the clip is the low one, resized.
    """

    low: Schedule
    high: Schedule
    last: int
    factor: int = 2
    to_the_end: bool = False


@torch.no_grad()
def generate_in_two_stages(
    model: Transformer,
    shape: tuple[int, int, int, int, int],
    condition: Condition,
    stages: Stages,
    generator: torch.Generator,
    upscaler: Upscaler = bilinear,
    guidance: Guidance = Distilled(),
    attention: str | Selector = "dense",
    cache: str | StepCache = "none",
    advance: Callable[[int], None] = to_nobody,
) -> Generated:
    """A clip of `shape` (clips, channels, frames, rows, columns); the generator draws the noise of the high stage, then of the low one.

    Each stage has its own state of attention and cache; `advance` is told after each pass how many of the high schedule's steps are done:
    those of the low stage are spread over the steps that it stands for. Raises InputError for sides that the factor does not divide.
    """
    *front, rows, columns = shape
    if rows % stages.factor or columns % stages.factor:
        raise InputError(f"{rows} x {columns} latents are no multiple of {stages.factor}", item="shape")
    high, like = stages.high.last(stages.last), model.like
    noise = torch.randn(shape, generator=generator, device=generator.device).to(like)

    def denoiser(schedule: Schedule) -> Denoiser:
        return Denoiser(model, condition, guidance, schedule.steps, attending(attention), Caching(step_cache(cache)))

    latents, spent, before = noise, Cost(0, 0, {}), stages.high.steps - high.steps
    if high.sigmas[0] < 1:
        low_shape = (*front, rows // stages.factor, columns // stages.factor)
        low_noise = torch.randn(low_shape, generator=generator, device=generator.device).to(like)
        first = denoiser(stages.low)
        clip = _clean(first, low_noise, stages.low, 0.0 if stages.to_the_end else high.sigmas[0], _spread(advance, before))
        latents = (1 - high.sigmas[0]) * upscaler(clip, (rows, columns)) + high.sigmas[0] * noise
        spent = first.cost
    second = denoiser(high)
    for step in range(high.steps):
        latents = high.step(latents, second.velocity(latents, high.time(step), step), step)
        advance(before + step + 1)
    return Generated(latents, _sum(spent, second.cost))


def snapped(frames: int, height: int, width: int) -> tuple[int, int, int]:
    """The nearest size that MiniMax-H3 makes: 17 n + 5 frames, rows and columns in multiples of 32."""
    return 17 * max(0, round((frames - 5) / 17)) + 5, 32 * max(1, round(height / 32)), 32 * max(1, round(width / 32))


def _clean(
    denoiser: Denoiser, latents: Tensor, schedule: Schedule, until: float, advance: Callable[[int, int], None]
) -> Float[Tensor, "b c f h w"]:
    """The clip that is expected by the last step that begins noisier than `until`; `advance` is told how many of how many are done."""
    clip, taken = latents, sum(sigma > until for sigma in schedule.sigmas[:-1])
    for step in range(taken):
        velocity = denoiser.velocity(latents, schedule.time(step), step)
        clip, latents = schedule.clean(latents, velocity, step), schedule.step(latents, velocity, step)
        advance(step + 1, taken)
    return clip


def _spread(advance: Callable[[int], None], steps: int) -> Callable[[int, int], None]:
    return lambda done, taken: advance(done * steps // taken)


def _sum(one: Cost, other: Cost) -> Cost:
    names = one.skipped.keys() | other.skipped.keys()
    skipped = {name: one.skipped.get(name, 0) + other.skipped.get(name, 0) for name in sorted(names)}
    return Cost(one.passes + other.passes, one.tokens + other.tokens, skipped)
