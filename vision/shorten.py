"""Fewer tokens inside a vision transformer, block by block: what a block shows, what a method answers, and who went where.

A method plans before the transformer runs how many patch tokens each block leaves, and says between the attention and the MLP of a block
which of them become one. The plan is applied to the stream, and at the end to whatever was read on the way, so that features, keys and
scores of any layer speak of the same final tokens. Sizes travel along: attention adds their logarithm, as if a token of five patches were
five tokens (proportional attention, ToMe, arXiv 2210.09461).

Letters: b rows of the batch, s tokens of the stream (class tokens first), n patches, m tokens left, d width, h heads, e width of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.vision.types import Media, VisionEncoder, VisualTokens

__all__ = ["WHOLE", "Groups", "Inside", "Shortened", "Shortener", "Shortening", "ShorteningEncoder", "Whole"]


@dataclass(frozen=True, slots=True)
class Inside:
    """What a block shows between its attention and its MLP: the stream, the block's queries and keys, and the patches of each token.

    The first `first` tokens are class tokens, which stay what they are.
    """

    hidden: Float[Tensor, "b s d"]
    query: Float[Tensor, "b h s e"]
    key: Float[Tensor, "b h s e"]
    size: Float[Tensor, "b s"]
    first: int


@runtime_checkable
class Shortener(Protocol):
    """A compressor of the encoder stage: the transformer itself runs on fewer and fewer tokens, and ends with exactly the budget."""

    def plan(self, n: int, count: int, depth: int) -> tuple[int, ...]:
        """How many of n patch tokens are left after each of `depth` blocks, never more than before; the last is `count`.

        Raises BudgetError where the method cannot get there.
        """
        ...

    def join(self, inside: Inside, count: int) -> Int[Tensor, "b s"]:
        """The token that each token becomes part of, in [0, first + count), every one used, class tokens at their own place."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """Shortens nothing."""

    def plan(self, n: int, count: int, depth: int) -> tuple[int, ...]:
        """All stay."""
        return (n,) * depth

    def join(self, inside: Inside, count: int) -> Int[Tensor, "b s"]:
        """Each token stays itself."""
        b, s, _ = inside.hidden.shape
        return torch.arange(s, device=inside.hidden.device).expand(b, -1)


@dataclass(frozen=True, slots=True)
class Shortening:
    """A method and the patch tokens it leaves after each block; without `counts` all stay."""

    by: Shortener = Whole()
    counts: tuple[int, ...] = ()


WHOLE = Shortening()


@dataclass(frozen=True, slots=True)
class Groups:
    """Who is together: the patches of each token (1 for a class token), and the token of each patch."""

    size: Float[Tensor, "b s"]
    owner: Int[Tensor, "b n"]
    first: int
    merged: bool = False

    @staticmethod
    def of(stream: Float[Tensor, "b s d"], first: int) -> "Groups":
        """Each patch for itself."""
        b, s, _ = stream.shape
        return Groups(stream.new_ones(b, s, dtype=torch.float32), torch.arange(first, s, device=stream.device).expand(b, -1), first)

    @property
    def bias(self) -> Float[Tensor, "b s"] | None:
        """What is added to attention scores, in float32: none as long as nothing was merged."""
        return self.size.log() if self.merged else None

    def joined(self, target: Int[Tensor, "b s"], count: int) -> "Groups":
        """The groups after every token joined its target, `count` patch tokens."""
        size = self.size.new_zeros(len(target), self.first + count).scatter_add_(1, target, self.size)
        return Groups(size, target.gather(1, self.owner), self.first, merged=True)

    @staticmethod
    def cat(parts: Sequence["Groups"]) -> "Groups":
        """The rows of several batches of one plan."""
        size, owner = (torch.cat(column) for column in zip(*((part.size, part.owner) for part in parts), strict=True))
        return Groups(size, owner, parts[0].first, parts[0].merged)

    def centres(self, columns: int) -> Int[Tensor, "b m 2"]:
        """The row and column of each patch token on a grid so many columns wide: its patches' mean, halves rounded up."""
        patch = torch.arange(self.owner.shape[1], device=self.owner.device)
        places = torch.stack((patch // columns, patch % columns), dim=1).float().expand(len(self.owner), -1, -1)
        sums = self.size.new_zeros(*self.size.shape, 2).scatter_add_(1, self.owner[..., None].expand_as(places), places)
        return (sums / self.size[..., None] + 0.5).floor().long()[:, self.first :]

    def carry(self, values: Float[Tensor, "b s k"], to: "Groups") -> Float[Tensor, "b m k"]:
        """Values of these groups' tokens as means over the tokens of later groups, weighted by size, in float32 inside."""
        if to is self:
            return values
        # every patch of a token leads to the same later token; class tokens keep their place
        target = torch.arange(values.shape[1], device=values.device).repeat(len(values), 1).scatter_(1, self.owner, to.owner)
        sums = self.size.new_zeros(len(values), to.size.shape[1], values.shape[2])
        terms = values.float() * self.size[..., None]
        sums.scatter_add_(1, target[..., None].expand_as(terms), terms)
        return (sums / to.size[..., None]).to(values.dtype)


@dataclass(frozen=True, slots=True)
class Shortened:
    """An input whose encoder was shortened: its tokens, and for each of its patches the place and the token that it became part of."""

    tokens: VisualTokens
    positions: Int[Tensor, "n 3"]
    owner: Int[Tensor, " n"]


@runtime_checkable
class ShorteningEncoder(VisionEncoder, Protocol):
    """A `VisionEncoder` whose transformer can be shortened; each frame of a clip is, by itself, and is not pooled afterwards."""

    def plan(self, size: tuple[int, int], frames: int, by: Shortener, count: int) -> list[Shortening]:
        """How each frame of an input of (height, width) pixels comes to its part of `count` tokens.

        Raises BudgetError where a frame would have no token, or the method cannot get there.
        """
        ...

    def shortened(self, media: Sequence[Media], plans: Sequence[Sequence[Shortening]]) -> list[Shortened]:
        """The tokens of each input, in input order, by one plan a frame."""
        ...
