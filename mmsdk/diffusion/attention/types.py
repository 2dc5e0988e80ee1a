"""What sparse attention speaks of: the grid of a latent video, the place of a call, blocks of a sequence, and what a method selects.

A method is a function from queries, keys and values to a block mask, or to a permutation and a block mask; one kernel executes them all.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.errors import InputError

__all__ = ["Blocks", "Choice", "Everything", "Grid", "Place", "Selection", "Selector"]


@dataclass(frozen=True, slots=True)
class Grid:
    """A latent video of frames x height x width tokens, frame by frame in raster order, between `before` and `after` tokens of text."""

    frames: int
    height: int
    width: int
    before: int = 0
    after: int = 0

    def __post_init__(self) -> None:
        if min(self.frames, self.height, self.width) < 1 or min(self.before, self.after) < 0:
            raise InputError(f"{self} is no video: every side is at least 1, text at least 0", item="grid")

    @property
    def frame(self) -> int:
        """Tokens of a frame."""
        return self.height * self.width

    @property
    def video(self) -> int:
        """Tokens of the video."""
        return self.frames * self.frame

    @property
    def tokens(self) -> int:
        """Tokens of the video and the text."""
        return self.before + self.video + self.after

    def text(self, device: torch.device) -> Bool[Tensor, " n"]:
        """Which tokens are text."""
        token = torch.arange(self.tokens, device=device)
        return (token < self.before) | (token >= self.before + self.video)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call stands: in the grid, in the denoising steps (counted from 0) and in the layers; and what is kept for it.

    `memory` is what the method's selection at the step before kept, of the same request, layer and branch of the guidance; () at the first.
    `gate` is a model's learned gate of a compressed branch (VSA), `projection` the layer's output projection, cut by heads (ReSS); methods
    that need one say so.
    """

    grid: Grid
    step: int = 0
    steps: int = 1
    layer: int = 0
    layers: int = 1
    memory: tuple[Tensor, ...] = ()
    gate: Float[Tensor, "b h s d"] | None = None
    projection: Float[Tensor, "h e d"] | None = None


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a sequence of `length` tokens is cut into blocks of at most `size`.

    `order` says which token stands at each place, None where they stand as they are. Block i holds the places from starts[i] to
    starts[i + 1]; without starts, `size` places each and a ragged last one. Both may differ by row of the batch and by head, or not.
    """

    size: int
    length: int
    starts: Int[Tensor, "#b #h blocks1"] | None = None
    order: Int[Tensor, "#b #h n"] | None = None

    @property
    def count(self) -> int:
        """How many blocks there are, empty ones among them."""
        return -(-self.length // self.size) if self.starts is None else self.starts.shape[2] - 1

    def bounds(self, device: torch.device) -> Int[Tensor, "#b #h blocks1"]:
        """The starts, also where blocks are even."""
        if self.starts is not None:
            return self.starts
        return (torch.arange(self.count + 1, device=device) * self.size).clamp_(max=self.length)[None, None]

    def sizes(self, device: torch.device) -> Int[Tensor, "#b #h blocks"]:
        """Tokens of each block."""
        return self.bounds(device).diff(dim=-1)


@dataclass(frozen=True, slots=True)
class Everything:
    """Dense attention: what methods choose at steps and in layers that they leave alone."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The blocks of keys that each block of queries reads.

    `residual`, in the order of the tokens, is added to the output. `memory` is handed back at the next step.
    """

    mask: Bool[Tensor, "b h rows columns"]
    queries: Blocks
    keys: Blocks
    residual: Float[Tensor, "b h s d"] | None = None
    memory: tuple[Tensor, ...] = ()

    def density(self) -> float:
        """The share of all pairs of a query and a key that are computed; waits for the device."""
        device = self.mask.device
        rows, columns = (blocks.sizes(device).double() for blocks in (self.queries, self.keys))
        columns = columns.repeat_interleave(self.mask.shape[1] // columns.shape[1], 1) if columns.shape[1] > 1 else columns
        pairs = (self.mask.double() * columns[:, :, None]).sum(-1) * rows
        return float(pairs.sum(-1).mean() / (self.queries.length * self.keys.length))


Choice = Everything | Selection


@runtime_checkable
class Selector(Protocol):
    """A method: which blocks are read, for all heads of one layer at one step. Pure and deterministic; what it keeps goes through `Place`.

    Tokens of text are read by all and read all, unless a method says otherwise. h / g query heads share a key-value head, in order.
    """

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"], place: Place
    ) -> Choice: ...
