"""Latents of more rows and columns from latents of fewer, without an autoencoder in between.

A reconstruction: the two-stage pipeline of MiniMax-H3 has a learned map of this kind, of which no more is published. Here it is a residual
over bilinear resizing; its last layer begins at zero, so that untrained it is bilinear resizing and nothing else. `python -m
mmsdk.apps.train_video --kind upscaler` trains one for our own model and writes it beside that.
"""

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.diffusion.checkpoint import write_weights
from mmsdk.errors import ModelError
from mmsdk.weights.safetensors import open_file

__all__ = ["LatentUpscaler", "bilinear", "open_upscaler", "save_upscaler"]

_WIDEST, _MOST = 4096, 256


def bilinear(latents: Float[Tensor, "b c f h w"], size: tuple[int, int]) -> Float[Tensor, "b c f h2 w2"]:
    """Each frame by itself."""
    frames = latents.transpose(1, 2).flatten(0, 1)
    resized = F.interpolate(frames.float(), size, mode="bilinear", align_corners=False).to(latents.dtype)
    clips: Tensor = resized.unflatten(0, (len(latents), -1)).transpose(1, 2)
    return clips


class LatentUpscaler(nn.Module):
    """Convolutions over what bilinear resizing makes, with neighbouring frames in every second block."""

    def __init__(self, channels: int, width: int = 64, blocks: int = 4) -> None:
        super().__init__()
        self.enter = nn.Conv3d(channels, width, (1, 3, 3), padding=(0, 1, 1))
        self.blocks = nn.ModuleList(_Block(width, frames=3 if number % 2 else 1) for number in range(blocks))
        self.leave = nn.Conv3d(width, channels, (1, 3, 3), padding=(0, 1, 1))
        for parameter in self.leave.parameters():
            nn.init.zeros_(parameter)

    def forward(self, latents: Float[Tensor, "b c f h w"], size: tuple[int, int]) -> Float[Tensor, "b c f h2 w2"]:
        """The same frames at another size, rows first."""
        plain = bilinear(latents, size)
        x = self.enter(plain)
        for block in self.blocks:
            x = block(x)
        out: Tensor = plain + self.leave(F.silu(x))
        return out


def save_upscaler(path: Path, upscaler: LatentUpscaler, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write its weights, as a whole or not at all; their shapes tell its sizes."""
    write_weights(path, upscaler, dtype)


def open_upscaler(path: Path, channels: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> LatentUpscaler:
    """The upscaler of a file, for latents of so many channels.

    Raises ModelError for tensors that are not one's, WeightsError where the file is damaged or missing.
    """
    stored = open_file(path)
    shape = stored.shape("enter.weight")
    blocks = len({name.split(".")[1] for name in stored.files if name.startswith("blocks.")})
    if len(shape) != 5 or shape[1] != channels or not 1 <= shape[0] <= _WIDEST or blocks > _MOST:
        raise ModelError(f"{path}: enter.weight is {shape}, with {blocks} blocks; it is no upscaler of {channels} channels")
    upscaler = LatentUpscaler(channels, shape[0], blocks)
    wanted = {name: tuple(value.shape) for name, value in upscaler.state_dict().items()}
    wrong = sorted(wanted.keys() ^ stored.files.keys()) or [name for name, like in wanted.items() if stored.shape(name) != like]
    if wrong:
        raise ModelError(f"{path}: {', '.join(wrong[:4])} are not those of an upscaler of {shape[0]} channels inside")
    upscaler.load_state_dict({name: stored.tensor(name) for name in wanted})
    return upscaler.to(device, dtype).eval().requires_grad_(False)


class _Block(nn.Module):
    def __init__(self, width: int, frames: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, width)
        self.convolution = nn.Conv3d(width, width, (frames, 3, 3), padding=(frames // 2, 1, 1))

    def forward(self, x: Float[Tensor, "b d f h w"]) -> Float[Tensor, "b d f h w"]:
        out: Tensor = x + self.convolution(F.silu(self.norm(x)))
        return out
