"""Trains the map from coarse clips to fine ones between two stages: a residual over bilinear resizing, on pairs of drawn clips.

The coarse clip is worn as what a model expects after half of its steps is: blurred and noisy. The error is of pixels and of the edges
between neighbours, in space and time. Resumable as all training here: a checkpoint has the weights, the optimiser and the step, and the
first Ctrl-C leaves one.
"""

import time
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from mmsdk.apps import kept
from mmsdk.apps.interrupts import Stop
from mmsdk.apps.train_video.world import SIDE, drawn, film
from mmsdk.diffusion.upscale import LatentUpscaler, bilinear

__all__ = ["STEPS", "gained", "taught"]

STEPS = 1500
_SEED, _HELD_OUT = 5_000_011, 6_000_013
_APART = 10_000_019  # from one seed's numbers to the next one's
_TOGETHER = 8  # clips
_RATE, _WARMUP = 1e-3, 50
_CHECKPOINT = "upscaler_checkpoint.safetensors"


def taught(
    folder: Path, steps: int = STEPS, every: float = 180.0, stop_after: int | None = None, seed: int = 0, width: int = 32
) -> tuple[int, LatentUpscaler]:
    """Train from the checkpoint in `folder` to the end, or `stop_after` steps further; the steps that are done, and the map as it is then.

    A checkpoint every so many seconds and at the end, which the first Ctrl-C brings about after the step that is being made.
    """
    first = _SEED + _APART * seed
    torch.manual_seed(first)
    upscaler = LatentUpscaler(3, width)
    optimiser = torch.optim.AdamW(upscaler.parameters(), lr=0.0, weight_decay=0.0)
    done = _resumed(folder / _CHECKPOINT, upscaler, optimiser)
    end = steps if stop_after is None else min(steps, done + stop_after)
    saved = time.monotonic()
    bar = tqdm(range(done, end), initial=done, total=steps, desc="upscaler", unit="step", mininterval=10)
    with bar, Stop() as stopping:
        for step in bar:
            for group in optimiser.param_groups:
                group["lr"] = _RATE * min(1.0, (step + 1) / _WARMUP, 1.05 - step / steps)
            _step(upscaler, optimiser, torch.Generator().manual_seed(first + step))
            done = step + 1
            last = done == end or stopping.asked
            if last or time.monotonic() - saved > every:
                _save(folder / _CHECKPOINT, upscaler, optimiser, done)
                saved = time.monotonic()
            if last:
                break
    return done, upscaler


@torch.no_grad()
def gained(upscaler: LatentUpscaler, clips: int) -> dict[str, float]:
    """Mean squared errors on so many held-out clips: of the map, and of bilinear resizing."""
    generator, size = torch.Generator().manual_seed(_HELD_OUT), (SIDE, SIDE)
    wrong = {"upscaler": 0.0, "bilinear": 0.0}
    for done in range(0, clips, _TOGETHER):
        rows = min(_TOGETHER, clips - done)
        coarse, fine = _pair(generator, rows)
        for name, made in (("upscaler", upscaler(coarse, size)), ("bilinear", bilinear(coarse, size))):
            wrong[name] += rows / clips * float((made - fine).square().mean())
    return {name: round(error, 6) for name, error in wrong.items()}


def _pair(generator: torch.Generator, rows: int = 1) -> tuple[Float[Tensor, "b 3 t h w"], Float[Tensor, "b 3 t h2 w2"]]:
    stories = drawn(rows, generator)
    fine = film(stories, SIDE, generator)
    coarse = F.avg_pool3d(fine, (1, 2, 2))
    smooth = bilinear(F.avg_pool3d(coarse, (1, 2, 2)), (SIDE // 2, SIDE // 2))
    blur, noise = (most * torch.rand(rows, 1, 1, 1, 1, generator=generator) for most in (0.6, 0.08))
    return torch.lerp(coarse, smooth, blur) + noise * torch.randn(coarse.shape, generator=generator), fine


def _step(upscaler: LatentUpscaler, optimiser: torch.optim.Optimizer, generator: torch.Generator) -> None:
    loss = _error(upscaler, generator)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def _error(upscaler: LatentUpscaler, generator: torch.Generator) -> Float[Tensor, ""]:
    coarse, fine = _pair(generator)
    wrong = upscaler(coarse, (SIDE, SIDE)) - fine
    edges = sum((wrong.diff(dim=axis).abs().mean() for axis in (2, 3, 4)), torch.zeros(()))
    loss: Tensor = wrong.square().mean() + 0.1 * edges
    return loss


def _save(path: Path, upscaler: LatentUpscaler, optimiser: torch.optim.Optimizer, step: int) -> None:
    kept.save(path, {"model": upscaler.state_dict()}, optimiser, {"step": str(step)})


def _resumed(path: Path, upscaler: LatentUpscaler, optimiser: torch.optim.Optimizer) -> int:
    if not path.is_file():
        return 0
    parts, facts = kept.resume(path, optimiser)
    upscaler.load_state_dict(parts["model"])
    return int(facts["step"])
