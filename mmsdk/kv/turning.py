"""How the keys of a layer turn with their position, so that a memory may move what it holds (RoFormer, arXiv 2104.09864).

Turning by a and then by b is turning by a + b: a key that was turned once can be moved on by any number of positions, without its
original. Channel i of a head is paired with channel i + d / 2, as everywhere here. Of an entry that is wider than what turns (a latent and
its rotated key) the last channels turn.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["Standing", "Turning"]


@dataclass(frozen=True, slots=True)
class Turning:
    """The angle of each pair of channels for one position. `amplitude` is what a key is multiplied by when it is first turned.

    `growing` says that the frequencies follow how far a row reaches, so that keys of one row may be turned by several.
    """

    frequencies: Float[Tensor, "*r f"]
    amplitude: float
    growing: bool

    def further(self, x: Float[Tensor, "b g n d"], by: Int[Tensor, "b #g n"]) -> Float[Tensor, "b g n d"]:
        """Keys that stand somewhere, moved on by so many positions, which may be negative; computed in float32."""
        angles = by[..., None].float() * self.frequencies.to(by.device)
        turned = 2 * angles.shape[-1]
        still, moved = x.split((x.shape[-1] - turned, turned), dim=-1)
        left, right = moved.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((still, (left * cos - right * sin).to(x.dtype), (right * cos + left * sin).to(x.dtype)), dim=-1)

    def mean(self, first: Int[Tensor, " b"], count: int) -> tuple[Float[Tensor, "b f"], Float[Tensor, "b f"]]:
        """The mean cosine and sine, amplitude and all, over `count` positions from `first` on."""
        positions = first[:, None] + torch.arange(count, device=first.device)
        angles = positions[:, None, :, None].float() * self.frequencies.to(first.device)
        return angles.cos().mean(dim=(1, 2)) * self.amplitude, angles.sin().mean(dim=(1, 2)) * self.amplitude

    def select(self, rows: Int[Tensor, " r"]) -> "Turning":
        """That of these rows."""
        return self if self.frequencies.ndim == 1 else replace(self, frequencies=self.frequencies[rows])


@dataclass(frozen=True, slots=True)
class Standing:
    """Where new tokens stand, and how they turn there; along several axes (M-RoPE) it is their place on the first, which is time."""

    places: Int[Tensor, "b s"]
    turning: Turning

    def row(self, place: int) -> "Standing":
        """Those of one row."""
        here = slice(place, place + 1)
        own = self.turning if self.turning.frequencies.ndim == 1 else replace(self.turning, frequencies=self.turning.frequencies[here])
        return Standing(self.places[here], own)
