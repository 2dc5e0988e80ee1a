"""Latents of more rows and columns from latents of fewer, without an autoencoder in between.

A reconstruction: the two-stage pipeline of MiniMax-H3 has a learned map of this kind, of which no more is published. Here it is a residual
over bilinear resizing; its last layer begins at zero, so that untrained it is bilinear resizing and nothing else.
"""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["LatentUpscaler", "bilinear"]


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


class _Block(nn.Module):
    def __init__(self, width: int, frames: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, width)
        self.convolution = nn.Conv3d(width, width, (frames, 3, 3), padding=(frames // 2, 1, 1))

    def forward(self, x: Float[Tensor, "b d f h w"]) -> Float[Tensor, "b d f h w"]:
        out: Tensor = x + self.convolution(F.silu(self.norm(x)))
        return out
