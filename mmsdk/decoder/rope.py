"""Rotary position embedding (RoFormer, arXiv 2104.09864) and the ways it is stretched to longer contexts.

Dimension i of a head is paired with dimension i + d/2, the layout of transformers' checkpoints. A scaling turns the base frequencies into
those that are used, and may multiply the rotated vectors by an `amplitude`. The formulas are the published ones, in float32 like the
checkpoints' own code, so that long positions agree to the last digit.

With several axes (M-RoPE, Qwen2-VL, arXiv 2409.12191) a token has a position for time, one for its row and one for its column, and each
frequency follows one of them. Words have the same on all three, so that for them it is the rotation of one axis.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kv.turning import Standing, Turning

__all__ = ["Divided", "Dynamic", "Linear", "Llama3", "LongRope", "Rope", "Rotation", "Scaling", "Sections", "Unscaled", "Yarn"]


@dataclass(frozen=True, slots=True)
class Unscaled:
    """The frequencies as they are."""

    amplitude: float = 1.0

    def __call__(self, frequencies: Float[Tensor, " f"], theta: float) -> Float[Tensor, " f"]:
        """Nothing changes."""
        return frequencies


@dataclass(frozen=True, slots=True)
class Linear:
    """Position interpolation (Chen et al., arXiv 2306.15595): every position counts 1 / factor."""

    factor: float
    amplitude: float = 1.0

    def __call__(self, frequencies: Float[Tensor, " f"], theta: float) -> Float[Tensor, " f"]:
        """All frequencies alike."""
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Divided:
    """A divisor for every frequency, as GGUF files store Llama 3's scaling (`rope_freqs.weight`)."""

    divisors: tuple[float, ...]
    amplitude: float = 1.0

    def __call__(self, frequencies: Float[Tensor, " f"], theta: float) -> Float[Tensor, " f"]:
        """Each frequency by its own divisor."""
        return frequencies / torch.tensor(self.divisors, device=frequencies.device)


@dataclass(frozen=True, slots=True)
class Llama3:
    """Llama 3.1's scaling: waves above original/low are stretched by `factor`, those below original/high kept, a blend between."""

    factor: float
    low: float
    high: float
    original: int
    amplitude: float = 1.0

    def __call__(self, frequencies: Float[Tensor, " f"], theta: float) -> Float[Tensor, " f"]:
        """By wavelength in tokens."""
        wavelength = 2 * math.pi / frequencies
        share = ((self.original / wavelength - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - share) * frequencies / self.factor + share * frequencies


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (Peng et al., arXiv 2309.00071): fast dimensions keep their frequency, slow ones are interpolated, a ramp between.

    `fast` and `slow` are the rotations over the original context where the ramp begins and ends; `truncate` rounds its ends outward.
    """

    factor: float
    original: int
    amplitude: float
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True

    def __call__(self, frequencies: Float[Tensor, " f"], theta: float) -> Float[Tensor, " f"]:
        """By the number of rotations over the original context."""
        dim = 2 * len(frequencies)
        low, high = (self._dimension(rotations, dim, theta) for rotations in (self.fast, self.slow))
        if self.truncate:
            # Floats again: a base close to 1 gives ends beyond any integer that a tensor can be offset by.
            low, high = float(math.floor(low)), float(math.ceil(high))
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low if high != low else 0.001
        kept = 1 - ((torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device) - low) / width).clamp(0, 1)
        return frequencies / self.factor * (1 - kept) + frequencies * kept

    def _dimension(self, rotations: float, dim: int, theta: float) -> float:
        return dim * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(theta))


@dataclass(frozen=True, slots=True)
class Dynamic:
    """NTK-aware scaling that grows with the sequence: from `original` tokens on, base' = base (f L / L0 - (f - 1))^(d / (d - 2)).

    L is how far a row reaches after the pass, so that what is read in two passes is not what is read in one; keys that are cached stay as
    they were turned. That is how transformers does it, which takes the longest row of a batch; here each row goes by its own.
    """

    factor: float
    original: int
    amplitude: float = 1.0

    def __call__(self, frequencies: Float[Tensor, " f"], theta: float) -> Float[Tensor, " f"]:
        """The frequencies of a short sequence."""
        return frequencies

    def reaching(self, frequencies: Float[Tensor, " f"], theta: float, lengths: Int[Tensor, " b"]) -> Float[Tensor, "b f"]:
        """Of rows that reach so far."""
        dim = 2 * len(frequencies)
        grown = self.factor * lengths.clamp_min(self.original) / self.original - (self.factor - 1)
        exponents = torch.arange(0, dim, 2, device=frequencies.device).float() / dim
        return 1.0 / (theta * grown ** (dim / (dim - 2)))[:, None] ** exponents


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE (Ding et al., arXiv 2402.13753): a divisor for each frequency, found by search; `long` ones for rows beyond `original`.

    As with `Dynamic`, what is cached stays as it was turned when a row grows beyond.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    amplitude: float

    def __call__(self, frequencies: Float[Tensor, " f"], theta: float) -> Float[Tensor, "2 f"]:
        """Those of short rows and those of long ones."""
        return frequencies / torch.tensor((self.short, self.long), device=frequencies.device)

    def reaching(self, frequencies: Float[Tensor, "2 f"], theta: float, lengths: Int[Tensor, " b"]) -> Float[Tensor, "b f"]:
        """Of rows that reach so far."""
        return torch.where(lengths[:, None] > self.original, frequencies[1], frequencies[0])


Scaling = Unscaled | Linear | Divided | Llama3 | Yarn | Dynamic | LongRope


@dataclass(frozen=True, slots=True)
class Sections:
    """How many frequencies follow time, row and column; none at all where there is one axis.

    They lie one section after another, or, `interleaved` (Qwen3-VL), by turns: time, row, column, time, ... until a section is used up,
    and what is left follows time.
    """

    counts: tuple[int, ...] = ()
    interleaved: bool = False

    def axes(self) -> Int[Tensor, " f"]:
        """The axis of each frequency."""
        if not self.interleaved:
            return torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts))
        frequency = torch.arange(sum(self.counts))
        turn, axis = frequency // len(self.counts), frequency % len(self.counts)
        return axis.masked_fill(turn >= torch.tensor(self.counts)[axis], 0)


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of every new token, shared by all heads and layers; `standing`, where it is told, is where they stand."""

    cos: Float[Tensor, "b 1 s f"]
    sin: Float[Tensor, "b 1 s f"]
    standing: tuple[Standing, ...] = ()

    def __call__(self, x: Float[Tensor, "b h s d"]) -> Float[Tensor, "b h s d"]:
        """Rotate queries or keys, d = 2 f; the result is contiguous."""
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * self.cos - right * self.sin, right * self.cos + left * self.sin), dim=-1)

    @staticmethod
    def still(like: Float[Tensor, "*n d"]) -> "Rotation":
        """None at all, of any number of tokens: what goes through it stays as it is, to the bit."""
        return Rotation(like.new_ones(1, 1, 1, 1), like.new_zeros(1, 1, 1, 1))

    def last(self, count: int) -> "Rotation":
        """That of the last so many tokens."""
        return Rotation(self.cos[:, :, -count:], self.sin[:, :, -count:])

    def row(self, place: int) -> "Rotation":
        """That of one row."""
        here = slice(place, place + 1)
        return Rotation(self.cos[here], self.sin[here], tuple(one.row(place) for one in self.standing))

    def undone(self, x: Float[Tensor, "b h s d"]) -> Float[Tensor, "b h s d"]:
        """What was rotated, as it was before, amplitude and all; in float32."""
        left, right = x.float().chunk(2, dim=-1)
        cos, sin = self.cos.float(), self.sin.float()
        back = torch.cat((left * cos + right * sin, right * cos - left * sin), dim=-1)
        return back / (cos.square() + sin.square()).repeat(1, 1, 1, 2)


class Rope:
    """Rotations from positions. The frequencies stay float32 when the model around them is cast."""

    def __init__(self, head_dim: int, theta: float, scaling: Scaling, sections: Sections = Sections()) -> None:
        base = 1.0 / theta ** (torch.arange(0, head_dim, 2, device="cpu").float() / head_dim)
        self._frequencies = scaling(base, theta)
        self._amplitude = scaling.amplitude
        self._theta, self._scaling = theta, scaling
        with torch.device("cpu"):
            self._axes = sections.axes() if sections.counts else torch.zeros(0, dtype=torch.int64)

    def __call__(self, positions: Int[Tensor, "*c b s"], dtype: torch.dtype) -> Rotation:
        """cos and sin of position * frequency; angles are float32, the result `dtype`. Padding (negative positions) turns as it may.

        Positions are [b s] where all axes agree, else [3 b s].
        """
        if self._frequencies.device != positions.device:
            self._frequencies, self._axes = self._frequencies.to(positions.device), self._axes.to(positions.device)
        along = positions[:, None, :, None] if positions.ndim == 2 else positions[self._axes].permute(1, 2, 0)[:, None]
        frequencies = self._reaching(positions)
        angles = along.float() * frequencies
        turning = Turning(frequencies, self._amplitude, isinstance(self._scaling, Dynamic | LongRope))
        standing = Standing(positions if positions.ndim == 2 else positions[0], turning)
        return Rotation((angles.cos() * self._amplitude).to(dtype), (angles.sin() * self._amplitude).to(dtype), (standing,))

    def _reaching(self, positions: Int[Tensor, "*c b s"]) -> Float[Tensor, "*r f"]:
        """The frequencies, for each row its own where they depend on how far it reaches."""
        if not isinstance(self._scaling, Dynamic | LongRope):
            return self._frequencies
        furthest = (positions if positions.ndim == 2 else positions.amax(0)).amax(1)
        return self._scaling.reaching(self._frequencies, self._theta, furthest + 1)[:, None, None]
