"""Fewer tokens inside a vision transformer, block by block: what a block shows, what a method answers, and who went where.

A method plans before the transformer runs how many patch tokens each block leaves, and says between the attention and the MLP of a block
which of them become one. The plan is applied to the stream, and at the end to whatever was read on the way, so that features, keys and
scores of any layer speak of the same final tokens. Sizes travel along: attention adds their logarithm, as if a token of five patches were
five tokens (proportional attention, ToMe, arXiv 2210.09461).

Where a family makes a token of several patches, what merges is what becomes one token: an `Area` says which squares of patches these are,
and each of a square's patches merges with the one at its own place in another square. This is ours; the paper's transformers have one
patch a token. Patches outside the area become no tokens: they take part in attention, stay by themselves, and are left out at the end.

Letters: b rows of the batch, s tokens of the stream (class tokens first), n patches, u squares of patches, m tokens left, d width, h heads,
e width of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.vision.packed import Rows
from mmsdk.vision.prune import Pruner, Pruning
from mmsdk.vision.types import Media, VisionEncoder, VisualTokens

__all__ = ["WHOLE", "Area", "Groups", "Inside", "PruningEncoder", "Shortened", "Shortener", "Shortening", "ShorteningEncoder", "Whole"]


@dataclass(frozen=True, slots=True)
class Inside:
    """What a block shows between its attention and its MLP: the stream, the block's queries and keys, and the patches of each token.

    The first `first` tokens are class tokens and patches outside the area, which stay what they are. Where tokens are made of squares of
    patches, each of the others is the mean of one.
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
class Area:
    """The patches of a view that become tokens: rows `top` to `bottom`, columns `left` to `right`, in squares of `side` x `side`.

    Rows and columns that make no whole square are not in it.
    """

    top: int
    bottom: int
    left: int
    right: int
    side: int = 1

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of squares."""
        return max(0, self.bottom - self.top) // self.side, max(0, self.right - self.left) // self.side

    @property
    def count(self) -> int:
        """u, the squares."""
        return self.grid[0] * self.grid[1]

    def order(self, view: tuple[int, int], device: torch.device) -> Int[Tensor, " n"]:
        """The patches of a view of (rows, columns): those outside, then square by square in reading order, each in its own."""
        rows, columns = self.grid
        number = torch.arange(view[0] * view[1], device=device).unflatten(0, view)
        inside = number[self.top : self.top + rows * self.side, self.left : self.left + columns * self.side]
        squares = inside.unflatten(0, (-1, self.side)).unflatten(2, (-1, self.side)).transpose(1, 2).flatten()
        outside = torch.ones(view[0] * view[1], dtype=torch.bool, device=device).index_fill(0, squares, False)
        return torch.cat((number.flatten()[outside], squares))


@dataclass(frozen=True, slots=True)
class Shortening:
    """A method and the patch tokens it leaves after each block; without `counts` all stay, without an `area` all patches are in it.

    Where a token is made of a square of patches, squares are counted.
    """

    by: Shortener = Whole()
    counts: tuple[int, ...] = ()
    area: tuple[Area, ...] = ()


WHOLE = Shortening()


@dataclass(frozen=True, slots=True)
class Groups:
    """Who is together: the patches of each token (1 for a class token), and the token of each patch.

    Behind the `first` ones, every `each` tokens are the patches of one square. Where rows were pruned, each by itself, the owner of a patch
    that was removed is -1, sizes behind the shorter rows are 0, and `ran` is of each patch the share of the blocks that ran with it.
    """

    size: Float[Tensor, "b s"]
    owner: Int[Tensor, "b n"]
    first: int
    merged: bool = False
    each: int = 1
    ran: Float[Tensor, "b n"] | None = None

    @staticmethod
    def of(stream: Float[Tensor, "b s d"], first: int) -> "Groups":
        """Each patch for itself."""
        b, s, _ = stream.shape
        return Groups(stream.new_ones(b, s, dtype=torch.float32), torch.arange(first, s, device=stream.device).expand(b, -1), first)

    @staticmethod
    def begin(stream: Float[Tensor, "b s d"], first: int, area: Area, order: Int[Tensor, " n"]) -> tuple[Float[Tensor, "b s d"], "Groups"]:
        """The stream with its patches in this order, and each patch for itself."""
        here = torch.cat((torch.arange(first, device=order.device), order + first))
        groups, each = Groups.of(stream, first), area.side**2
        owner = (order.argsort() + first).expand(len(stream), -1)
        return stream[:, here], Groups(groups.size, owner, stream.shape[1] - area.count * each, each=each)

    @staticmethod
    def pruned(rows: Rows, ran: Float[Tensor, "b n"]) -> "Groups":
        """Each patch that is left for itself."""
        b = len(rows.lengths)
        place = torch.arange(len(rows.token), device=rows.token.device) - rows.starts[rows.row]
        owner = place.new_full((b * rows.full,), -1).index_copy_(0, rows.token, place).unflatten(0, (b, rows.full))
        return Groups(rows.padded(ran.new_ones(len(place))), owner[:, rows.first :], rows.first, ran=ran)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The patch tokens of each row; read back from the device."""
        lengths: list[int] = (self.size[:, self.first :] > 0).sum(dim=1).tolist()
        return tuple(lengths)

    @property
    def count(self) -> int:
        """The tokens that are left, where those of `each` patches count once."""
        return (self.size.shape[1] - self.first) // self.each

    @property
    def bias(self) -> Float[Tensor, "b s"] | None:
        """What is added to attention scores, in float32: none as long as nothing was merged."""
        return self.size.log() if self.merged else None

    def target(self, by: Shortener, inside: Inside, count: int) -> Int[Tensor, "b s"]:
        """The token that each token becomes part of: the patches of a square go where it goes, each to the one at its own place there."""
        hidden, size = self.squares(inside.hidden, 1), self.squares(inside.size, 1)
        target = by.join(Inside(hidden, self.squares(inside.query, 2), self.squares(inside.key, 2), size, self.first), count)
        if self.each == 1:
            return target
        places = torch.arange(self.each, device=target.device)
        inner = (target[:, self.first :, None] - self.first) * self.each + places
        return torch.cat((target[:, : self.first], self.first + inner.flatten(1)), dim=1)

    def squares(self, values: Float[Tensor, "*_"], dim: int) -> Float[Tensor, "*_"]:
        """Means over what becomes one token, along the dimension of the stream."""
        if self.each == 1:
            return values
        head, rest = values.split((self.first, values.shape[dim] - self.first), dim=dim)
        return torch.cat((head, rest.unflatten(dim, (-1, self.each)).mean(dim=dim + 1)), dim=dim)

    def joined(self, target: Int[Tensor, "b s"], count: int) -> "Groups":
        """The groups after every token joined its target, `count` of what becomes one token."""
        size = self.size.new_zeros(len(target), self.first + count * self.each).scatter_add_(1, target, self.size)
        return Groups(size, target.gather(1, self.owner), self.first, merged=True, each=self.each)

    def tokens(self, area: Area, view: tuple[int, int]) -> "Groups":
        """Who is together among the squares of an area alone, in reading order; sizes count squares."""
        order = area.order(view, self.owner.device)
        owner = (self.owner[:, order[len(order) - area.count * self.each :: self.each]] - self.first) // self.each
        return Groups(self.size[:, self.first :: self.each], owner, 0, self.merged)

    @staticmethod
    def cat(parts: Sequence["Groups"]) -> "Groups":
        """The rows of several batches of one plan."""
        size, owner = (torch.cat(column) for column in zip(*((part.size, part.owner) for part in parts), strict=True))
        return Groups(size, owner, parts[0].first, parts[0].merged, parts[0].each)

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
        # all rows as one: a processor adds whole vectors by their number, and scatters in more dimensions number by number
        b, most = to.size.shape
        number = (target + most * torch.arange(b, device=target.device)[:, None]).flatten()
        terms = (values.float() * self.size[..., None]).flatten(0, 1)
        sums: Tensor = terms.new_zeros(b * most, values.shape[2]).index_add_(0, number, terms).unflatten(0, (b, most))
        return (sums / to.size[..., None]).to(values.dtype)


@dataclass(frozen=True, slots=True)
class Shortened:
    """An input whose encoder was shortened: its tokens, and for each of its patches the place and the token that it became part of.

    The owner of a patch that was removed is -1; scores are zeros where the method has none.
    """

    tokens: VisualTokens
    positions: Int[Tensor, "n 3"]
    owner: Int[Tensor, " n"]
    scores: Float[Tensor, " n"]


@runtime_checkable
class ShorteningEncoder(VisionEncoder, Protocol):
    """A `VisionEncoder` whose transformer can be shortened. What it looks at at one time (a tile, a frame) is, by itself."""

    def plan(self, size: tuple[int, int], frames: int, by: Shortener, count: int) -> list[Shortening]:
        """How each view of an input of (height, width) pixels comes to its part of `count` tokens.

        Raises BudgetError where a view would have no token, or the method cannot get there.
        """
        ...

    def shortened(self, media: Sequence[Media], plans: Sequence[Sequence[Shortening]]) -> list[Shortened]:
        """The tokens of each input, in input order, by one plan a view."""
        ...


@runtime_checkable
class PruningEncoder(VisionEncoder, Protocol):
    """A `VisionEncoder` in whose transformer tokens can be removed; each frame of a clip is, by itself, and is not pooled afterwards."""

    def prunings(self, size: tuple[int, int], frames: int, by: Pruner, count: int, exact: bool) -> list[Pruning]:
        """How each frame of an input of (height, width) pixels comes to its part of `count` tokens, or, not exact, to no more.

        Raises BudgetError where a frame would have no token.
        """
        ...

    def pruned(self, media: Sequence[Media], plans: Sequence[Sequence[Pruning]]) -> list[Shortened]:
        """The tokens of each input, in input order, by one plan a frame."""
        ...
