"""The ratios that MagCache goes by, measured in a generation: how much longer the layers' residual of each token is than a step before."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.diffusion.attending import DenseAttending
from mmsdk.diffusion.caching import Caching, Kept, Pass, Passed
from mmsdk.diffusion.generate import Denoiser
from mmsdk.diffusion.guidance import Distilled
from mmsdk.diffusion.schedule import Schedule
from mmsdk.diffusion.types import Condition, Transformer

__all__ = ["measured"]


@dataclass(frozen=True, slots=True)
class _Measuring:
    """Computes all, and keeps the ratios so far."""

    def __call__(self, run: Pass) -> Passed:
        out = run.whole()
        residual = out - run.x
        ratio = 1.0
        if run.kept.tensors:
            now, before = (x.float().norm(dim=-1) for x in (residual, run.kept.tensors[0]))
            ratio = float((now / (before + 1e-8)).mean())
        return Passed(out, Kept((residual,), (*run.kept.numbers, ratio)))


@torch.no_grad()
def measured(model: Transformer, noise: Float[Tensor, "b c f h w"], condition: Condition, schedule: Schedule) -> tuple[float, ...]:
    """The ratio of each step, 1 at the first, as arXiv 2506.09045 measures them: of one clip, with its text."""
    cache = Caching(_Measuring())
    denoiser = Denoiser(model, condition, Distilled(), schedule.steps, DenseAttending(), cache)
    latents = noise
    for step in range(schedule.steps):
        latents = schedule.step(latents, denoiser.velocity(latents, schedule.time(step), step), step)
    return cache.numbers("cond")
