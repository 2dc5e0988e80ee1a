"""Fewer tokens inside a vision transformer, picture by picture: what a block shows before it runs, and who decides what stays.

Where `mmsdk.vision.shorten` merges by a plan that is made before the transformer runs, here each row of a batch goes its own way: an agent
looks at the stream in front of a block and removes tokens for good. Rows of different lengths go on in one pass (`mmsdk.vision.packed`).

Letters: s tokens of all rows together, class tokens first in each row, d width.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

from mmsdk.vision.packed import Rows

__all__ = ["Agent", "Pruner", "Pruning", "View", "flops"]


@dataclass(frozen=True, slots=True)
class View:
    """What is there before block `block` (counted from 0) of `depth` runs.

    `received` is the attention that each token received in the block before from the class token of its row, mean over heads.
    """

    block: int
    depth: int
    stream: Float[Tensor, "s d"]
    received: Float[Tensor, " s"]
    rows: Rows


@runtime_checkable
class Agent(Protocol):
    """Decides for one kind of transformer; deterministic, and row by row."""

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks before which it looks, ascending, none of them the first."""
        ...

    def __call__(self, view: View) -> Bool[Tensor, " s"]:
        """True for what stays."""
        ...


@runtime_checkable
class Pruner(Protocol):
    """A compressor of the encoder stage that removes tokens, of each picture as many as it finds right, or exactly so many."""

    def agent(self, stream: Float[Tensor, "b n d"], depth: int, first: int, most: int, exact: bool) -> Agent:
        """The agent for a transformer of `depth` blocks and `first` class tokens, on the device of its first stream.

        It leaves at most `most` patch tokens of each row, exactly as many where that is asked. Raises ModelError where it was made for
        another transformer.
        """
        ...


@dataclass(frozen=True, slots=True)
class Pruning:
    """Who prunes, and the patch tokens left of each frame: exactly `most`, or no more than these."""

    by: Pruner
    most: int
    exact: bool = True


def flops(tokens: int, width: int, hidden: int, *, gated: bool = False) -> int:
    """Floating-point operations of one block over a row of so many tokens, a multiplication and an addition being two.

    `hidden` is the width inside the MLP, which has three matrices instead of two where it is `gated`. Norms, biases and activations, less
    than one in a hundred, are left out, as is usual.
    """
    linear = 4 * width * width + (3 if gated else 2) * width * hidden
    return 2 * tokens * linear + 4 * tokens * tokens * width
