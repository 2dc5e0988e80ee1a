"""Trains the map from coarse clips to fine ones between two stages: a residual over bilinear resizing, on pairs of drawn clips.

The coarse clip is worn as what a model expects after half of its steps is: blurred and noisy. The error is of pixels and of the edges
between neighbours, in space and time. Resumable as all training here: a checkpoint has the weights, the optimiser and the step.
"""

import time
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from mmsdk.apps.train_video.world import SIDE, drawn, film
from mmsdk.diffusion.upscale import LatentUpscaler, bilinear, save_upscaler

__all__ = ["STEPS", "gained", "taught"]

STEPS = 1500
_SEED, _HELD_OUT = 5_000_011, 6_000_013
_RATE, _WARMUP = 1e-3, 50
_CHECKPOINT = "upscaler_checkpoint.safetensors"


def taught(folder: Path, target: Path, steps: int = STEPS, every: float = 180.0, stop_after: int | None = None, width: int = 32) -> int:
    """Train from the checkpoint in `folder` to the end, or `stop_after` steps further, and write the map; the steps that are done."""
    torch.manual_seed(_SEED)
    upscaler = LatentUpscaler(3, width)
    optimiser = torch.optim.AdamW(upscaler.parameters(), lr=0.0, weight_decay=0.0)
    done = _resumed(folder / _CHECKPOINT, upscaler, optimiser)
    end = steps if stop_after is None else min(steps, done + stop_after)
    saved = time.monotonic()
    for step in tqdm(range(done, end), initial=done, total=steps, desc="upscaler", unit="step", mininterval=10):
        for group in optimiser.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / _WARMUP, 1.05 - step / steps)
        loss = _error(upscaler, torch.Generator().manual_seed(_SEED + step))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        done = step + 1
        if done == end or time.monotonic() - saved > every:
            _save(folder / _CHECKPOINT, upscaler, optimiser, done)
            saved = time.monotonic()
    save_upscaler(target, upscaler)
    return done


@torch.no_grad()
def gained(upscaler: LatentUpscaler, clips: int = 8) -> dict[str, float]:
    """Mean squared errors on held-out clips: of the map, and of bilinear resizing."""
    coarse, fine = _pair(torch.Generator().manual_seed(_HELD_OUT), clips)
    size = (SIDE, SIDE)
    told = {"upscaler": upscaler(coarse, size), "bilinear": bilinear(coarse, size)}
    return {name: round(float((made - fine).square().mean()), 6) for name, made in told.items()}


def _pair(generator: torch.Generator, rows: int = 1) -> tuple[Float[Tensor, "b 3 t h w"], Float[Tensor, "b 3 t h2 w2"]]:
    stories = drawn(rows, generator)
    fine = film(stories, SIDE, generator)
    coarse = F.avg_pool3d(fine, (1, 2, 2))
    smooth = bilinear(F.avg_pool3d(coarse, (1, 2, 2)), (SIDE // 2, SIDE // 2))
    blur, noise = (most * torch.rand(rows, 1, 1, 1, 1, generator=generator) for most in (0.6, 0.08))
    return torch.lerp(coarse, smooth, blur) + noise * torch.randn(coarse.shape, generator=generator), fine


def _error(upscaler: LatentUpscaler, generator: torch.Generator) -> Float[Tensor, ""]:
    coarse, fine = _pair(generator)
    wrong = upscaler(coarse, (SIDE, SIDE)) - fine
    edges = sum((wrong.diff(dim=axis).abs().mean() for axis in (2, 3, 4)), torch.zeros(()))
    loss: Tensor = wrong.square().mean() + 0.1 * edges
    return loss


def _save(path: Path, upscaler: LatentUpscaler, optimiser: torch.optim.Optimizer, step: int) -> None:
    tensors = {f"model.{name}": value.detach() for name, value in upscaler.state_dict().items()}
    for index, state in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{index}.{name}": value for name, value in state.items()}
    part = path.with_suffix(".part")
    save_file({name: value.contiguous() for name, value in (tensors | {"step": torch.tensor(step)}).items()}, part)
    part.replace(path)


def _resumed(path: Path, upscaler: LatentUpscaler, optimiser: torch.optim.Optimizer) -> int:
    if not path.is_file():
        return 0
    tensors = load_file(path)
    upscaler.load_state_dict({name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")})
    state = optimiser.state_dict()
    state["state"] = {}
    for key, value in tensors.items():
        if key.startswith("optimiser."):
            _, index, name = key.split(".")
            state["state"].setdefault(int(index), {})[name] = value
    optimiser.load_state_dict(state)
    return int(tensors["step"])
