"""The one-dimensional U-Net of Diffusion Policy (Chi et al., arXiv 2303.04137), conditioned by FiLM [published].

Along the chunk, every level halves its length: two residual blocks, then a stride of 2; on the way up the mirrored level is joined in.
Time (sine embedding and an MLP) and observations modulate each block by scale and shift.

Letters: b rows, h actions, a numbers of an action, c numbers of the condition, k channels of a level.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mmsdk.errors import ModelError

__all__ = ["UNet", "UNetConfig"]


@dataclass(frozen=True, slots=True)
class UNetConfig:
    """Sizes; the defaults are lerobot's. h must divide by 2 for every level but the last."""

    action_dim: int = 7
    condition: int = 512
    levels: tuple[int, ...] = (512, 1024, 2048)
    kernel: int = 5
    groups: int = 8
    time: int = 128

    def __post_init__(self) -> None:
        if not self.levels or any(level % self.groups for level in self.levels) or self.kernel % 2 == 0 or self.time % 2:
            raise ModelError(f"a U-Net has levels that its groups divide, an odd kernel and an even time width, not {self}")


class UNet(nn.Module):
    """Predicts the noise in noisy actions."""

    def __init__(self, config: UNetConfig = UNetConfig()) -> None:
        super().__init__()
        self.config = config
        self.time = nn.Sequential(nn.Linear(config.time, 4 * config.time), nn.Mish(), nn.Linear(4 * config.time, config.time))
        widths = (config.action_dim, *config.levels)
        pairs = list(pairwise(widths))
        last = len(pairs) - 1
        self.down = nn.ModuleList(_Level(config, k, wider, _halved(wider, i < last)) for i, (k, wider) in enumerate(pairs))
        self.middle = nn.ModuleList(_Block(config, config.levels[-1], config.levels[-1]) for _ in range(2))
        ups = [(2 * wider, k) for k, wider in reversed(pairs[1:])]
        self.up = nn.ModuleList(_Level(config, joined, k, _doubled(k)) for joined, k in ups)
        self.out = nn.Sequential(
            _convolution(config, config.levels[0], config.levels[0]), nn.Conv1d(config.levels[0], config.action_dim, 1)
        )

    def forward(self, x: Float[Tensor, "b h a"], t: Int[Tensor, " b"], condition: Float[Tensor, "b c"]) -> Float[Tensor, "b h a"]:
        """eps of noisy actions at the whole times t."""
        told = torch.cat((self.time(_sines(t, self.config.time).to(condition.dtype)), condition), dim=-1)
        y, kept = x.transpose(1, 2), list[Tensor]()
        for level in self.down:
            inside, y = level(y, told)
            kept.append(inside)
        for block in self.middle:
            y = block(y, told)
        for level in self.up:
            _, y = level(torch.cat((y, kept.pop()), dim=1), told)
        out: Tensor = self.out(y)
        return out.transpose(1, 2)


class _Level(nn.Module):
    """Two blocks, and what changes the length after them; gives both."""

    def __init__(self, config: UNetConfig, narrow: int, wide: int, resize: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.resize = _Block(config, narrow, wide), _Block(config, wide, wide), resize

    def forward(self, y: Float[Tensor, "b k h"], told: Float[Tensor, "b c"]) -> tuple[Tensor, Tensor]:
        inside = self.second(self.first(y, told), told)
        return inside, self.resize(inside)


class _Block(nn.Module):
    """Convolve, scale and shift by what is told, convolve; the input is added."""

    def __init__(self, config: UNetConfig, narrow: int, wide: int) -> None:
        super().__init__()
        self.first, self.second = _convolution(config, narrow, wide), _convolution(config, wide, wide)
        self.film = nn.Sequential(nn.Mish(), nn.Linear(config.time + config.condition, 2 * wide))
        self.skip: nn.Module = nn.Identity() if narrow == wide else nn.Conv1d(narrow, wide, 1)

    def forward(self, y: Float[Tensor, "b k h"], told: Float[Tensor, "b c"]) -> Tensor:
        scale, shift = self.film(told)[..., None].chunk(2, dim=1)
        out: Tensor = self.second(scale * self.first(y) + shift) + self.skip(y)
        return out


def _convolution(config: UNetConfig, narrow: int, wide: int) -> nn.Module:
    convolution = nn.Conv1d(narrow, wide, config.kernel, padding=config.kernel // 2)
    return nn.Sequential(convolution, nn.GroupNorm(config.groups, wide), nn.Mish())


def _halved(width: int, wanted: bool) -> nn.Module:
    return nn.Conv1d(width, width, 3, stride=2, padding=1) if wanted else nn.Identity()


def _doubled(width: int) -> nn.Module:
    return nn.ConvTranspose1d(width, width, 4, stride=2, padding=1)


def _sines(t: Int[Tensor, " b"], width: int) -> Float[Tensor, "b w"]:
    half = width // 2
    frequencies = torch.exp(torch.arange(half, device=t.device) * (-math.log(10_000) / (half - 1)))
    angles = t[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=-1)
