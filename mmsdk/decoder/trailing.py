"""Rotary positions for the last channels of a head, each channel paired with its neighbour (DeepSeek's layout).

The channels before them have no position. Where keys are values too, what an attention puts out has been turned with them, to positions of
the past; `back` turns it by its query's position the other way, so that only distances are left.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.decoder.rope import Scaling

__all__ = ["TrailingRope", "Turn"]


@dataclass(frozen=True, slots=True)
class Turn:
    """The rotation of some tokens: the last 2 f of d channels turn, in float32."""

    cos: Float[Tensor, "b 1 s f"]
    sin: Float[Tensor, "b 1 s f"]

    def __call__(self, x: Float[Tensor, "b h s d"]) -> Float[Tensor, "b h s d"]:
        """To the tokens' positions."""
        return self._turned(x, self.sin)

    def back(self, x: Float[Tensor, "b h s d"]) -> Float[Tensor, "b h s d"]:
        """By as much the other way."""
        return self._turned(x, -self.sin)

    def _turned(self, x: Float[Tensor, "b h s d"], sin: Float[Tensor, "b 1 s f"]) -> Float[Tensor, "b h s d"]:
        turning = 2 * sin.shape[-1]
        still, pairs = x[..., : x.shape[-1] - turning], x[..., x.shape[-1] - turning :]
        even, odd = pairs[..., 0::2].float(), pairs[..., 1::2].float()
        turned = torch.stack((even * self.cos - odd * sin, odd * self.cos + even * sin), dim=-1).flatten(-2)
        return torch.cat((still, turned.to(x.dtype)), dim=-1)


class TrailingRope:
    """Turns from positions. The frequencies stay float32 when the model around them is cast."""

    def __init__(self, turning: int, theta: float, scaling: Scaling) -> None:
        base = 1.0 / theta ** (torch.arange(0, turning, 2, device="cpu").float() / turning)
        self._frequencies = scaling(base, theta)
        self._amplitude = scaling.amplitude

    def __call__(self, positions: Int[Tensor, "b s"]) -> Turn:
        """cos and sin of position * frequency. Padding (negative positions) turns as it may."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions[:, None, :, None].float() * self._frequencies
        return Turn(angles.cos() * self._amplitude, angles.sin() * self._amplitude)
