"""Braco: tokens as coordinates in a transform basis, of which the low frequencies stay, beside a few tokens for what they miss.

Published, in an abstract without code: basis transform and structured truncation; basis-coordinate embeddings that do not depend on the
input; an orthogonal re-parameterisation for each budget; learned spatial residual tokens from light pooling. Its figures (95.2 % of the
accuracy at 23x to 64x, prefill FLOPs down by 84 to 87 %) are its own, of its own models.

Everything else is our reconstruction:

1. Y = B X with the rows of B of an orthonormal basis: DCT-II, Haar (the grid padded by reflection to powers of two) or principal directions
   of calibration tokens. Of k tokens k_r are residual ones, floor(k / 4) and below 8 none; a box of at most k - k_r low frequencies stays,
   of proportions as near the grid's as there are, and what it leaves of k goes to the residual. Divided by sqrt(n / k_b), coefficients
   are as large as tokens.
2. Y' = Y + E, E by coefficient.
3. T = Q Y', Q = (I - A) (I + A)^-1 Q_0 orthogonal. Q_0 is the inverse DCT of the box, so that T is a small picture of the large one, and
   for the other bases the means of the picture's parts, made orthonormal from the coarsest coefficient on.
4. R = X - Xhat is what the basis misses. Residual token c pools its part of the picture, sum_i w_i x_i with w_i in proportion to
   |R_i|^2 exp(s x_i), and becomes x + x D U + b; further scoring vectors s pool further x of the same part, whose x D U are added.

Basis tokens sit in the middle of their parts, residual ones at their (first) weighted centre, and each weighs n / k. Untrained, E, A, s, U
and b are zero. A clip is a box of three axes (its residual parts divide time first), or each frame is coded by itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import BudgetError, InputError, PluginError
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.clustering import filled
from mmsdk.tokencomp.coder import Trained, coder_path, read_coder, untrained
from mmsdk.tokencomp.layout import flat, layout
from mmsdk.tokencomp.plan import reading_key
from mmsdk.tokencomp.ranking import first_best, place
from mmsdk.tokencomp.similarity import rows_at
from mmsdk.tokencomp.stack import Stack, in_stacks
from mmsdk.tokencomp.transform import Grid, inside
from mmsdk.tokencomp.types import Compressed, Side
from mmsdk.vision.types import VisualTokens

__all__ = ["Braco"]

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Coded:
    """Tokens in reading order, the cell of the grid that each sits in, the token that tells of each cell, and |R_i|^2 of each cell."""

    tokens: Float[Tensor, "b k d"]
    cells: Int[Tensor, "b k"]
    owner: Int[Tensor, "b n"]
    missed: Float[Tensor, "b n"]


@dataclass(frozen=True, slots=True)
class Braco:
    """A `basis` over the whole `span` of a clip or over each frame; the token count is met exactly.

    `local` starts Q at Q_0, else at the identity. Without `residual` tokens the k lowest frequencies stay, with Q_0 where they fill a box
    and the identity elsewhere. `coder` names what was trained ("mini", or the path of a file), `calibration` the file that the basis "pca"
    is read from. Raises PluginError for a file that is not there and for knobs that exclude each other.
    """

    side: ClassVar[Side] = "behind"
    asks: ClassVar[bool] = False

    basis: Literal["dct", "haar", "pca"] = "dct"
    span: Literal["clip", "frame"] = "clip"
    local: bool = True
    residual: bool = True
    coder: str = "none"
    calibration: str = "mini"

    def __post_init__(self) -> None:
        if self.basis == "pca":
            coder_path(self.calibration)
        if self.coder == "none":
            return
        if not (self.residual and self.local and self.span == "clip"):
            raise PluginError("a trained coder of braco has residual tokens, starts local and takes whole clips; leave those knobs out")
        trained = read_coder(self.coder, CPU)
        if trained.basis != self.basis:
            raise PluginError(f"the coder {self.coder!r} was trained on the basis {trained.basis!r}, not {self.basis!r}")

    def __call__(
        self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget], query: Sequence[Float[Tensor, "_ d"]] | None = None
    ) -> list[Compressed]:
        """Raises BudgetError for a count that the coder was not trained for, or too small to give each frame a token where it needs one."""
        return in_stacks("braco", tokens, budgets, self._compress)

    def _compress(self, stack: Stack) -> list[Compressed]:
        if self.basis == "pca":
            self._calibrated(stack)
        shown = _shown(stack.positions(), stack.grid)
        # one by one, since sums may come out otherwise in company
        coded = [self._coded(item.features[cells][None].float(), stack) for item, cells in zip(stack.items, shown, strict=True)]
        here = torch.stack([reading_key(item.positions, stack.grid) for item in stack.items])
        cells, owner, missed = (torch.cat(column) for column in zip(*((one.cells, one.owner, one.missed) for one in coded), strict=True))
        missed = missed.gather(1, here)
        labels = filled(owner.gather(1, here), -missed, stack.count)
        merged = stack.merge(labels, shown.gather(1, cells), [one.tokens[0] for one in coded], missed)
        return [_evenly(one, item) for one, item in zip(merged, stack.items, strict=True)]

    def _coded(self, x: Float[Tensor, "b n d"], stack: Stack) -> Coded:
        """The stack's grid of tokens coded whole, or frame by frame."""
        if self.coder != "none":
            return self.code(x, stack.grid, stack.count, self._trained(stack))
        frames, rows, columns = stack.grid
        if self.span == "clip" or frames == 1:
            return self.code(x, stack.grid, stack.count, untrained(x.shape[2], _residual(stack.count), x.device))
        if stack.count < frames:
            raise BudgetError(f"each of {frames} frames is coded by itself; {stack.count} tokens are too few", index=stack.places[0])
        counts = [(t + 1) * stack.count // frames - t * stack.count // frames for t in range(frames)]
        sets = [untrained(x.shape[2], _residual(count), x.device) for count in counts]
        planes = zip(x.split(rows * columns, dim=1), counts, sets, strict=True)
        return _joined([self.code(plane, (1, rows, columns), count, one) for plane, count, one in planes])

    def code(self, x: Float[Tensor, "b n d"], grid: Grid, count: int, trained: Trained) -> Coded:
        """All n tokens of a grid, in reading order, as `count` tokens; differentiable in x and in what was trained."""
        plan = layout(self.basis, self.calibration, grid, count, trained.residual, x.device, local=self.local, boxed=self.residual)
        basis = plan.basis
        y = basis.analysis @ x
        missed = (x - basis.synthesis @ y).square().sum(dim=2)

        y = y * math.sqrt(len(basis.analysis) / basis.size) + trained.embedded(plan.index)
        low_tokens = trained.turned(plan.box, plan.start) @ y

        # a part without any error is pooled evenly
        scores = missed.clamp_min(torch.finfo(torch.float32).tiny).log()[:, None] + trained.score @ x.transpose(1, 2)
        shares = scores[:, :, None].masked_fill(~plan.pools, -torch.inf).softmax(dim=3)
        residual_tokens, share = trained.mapped(shares @ x[:, None]), shares[:, 0]

        cells = torch.cat([plan.cells.expand(len(x), -1), _centre(share, grid)], dim=1)
        numbers = torch.arange(len(plan.cells), count, device=x.device).expand(len(x), -1)
        owner = plan.owner.expand(len(x), -1).scatter(1, first_best(share), numbers)
        order = cells.argsort(dim=1, stable=True)
        tokens = rows_at(torch.cat([low_tokens, residual_tokens], dim=1), order)
        return Coded(tokens, cells.gather(1, order), place(order).gather(1, owner), missed)

    def _trained(self, stack: Stack) -> Trained:
        """The set of the stack's budget. Raises BudgetError where there is none, InputError where tokens are not as wide as it."""
        features = stack.items[0].features
        coder, media = read_coder(self.coder, features.device), "clip" if stack.grid[0] > 1 else "image"
        if (media, stack.count) not in coder.sets:
            raise BudgetError(
                f"the coder {self.coder!r} of braco was trained for {coder.budgets}, not for {stack.count} tokens of this {media}; "
                "ask for one of these, or leave the coder out",
                index=stack.places[0],
            )
        if coder.width != features.shape[1]:
            raise InputError(
                f"the coder {self.coder!r} of braco is of a model with embeddings {coder.width} wide, these are {features.shape[1]} wide; "
                "leave the coder out, or train one for this model",
                item="coder",
                index=stack.places[0],
            )
        return coder.sets[media, stack.count]

    def _calibrated(self, stack: Stack) -> None:
        """Raises InputError for a grid without calibrated directions, BudgetError for a count of more than there are."""
        grid, known = stack.grid, read_coder(self.calibration, CPU).calibration
        if self.span == "frame":
            grid = (1, *grid[1:])
        if grid not in known:
            raise InputError(
                f"braco has directions of {sorted(known)} in {self.calibration!r}, not of a grid {grid}; use the basis dct",
                item="calibration",
                index=stack.places[0],
            )
        most = -(-stack.count * grid[0] // stack.grid[0])
        if most > len(known[grid]):
            raise BudgetError(f"{most} tokens are more than the {len(known[grid])} calibrated directions of braco", index=stack.places[0])


def _residual(count: int) -> int:
    """k_r, before what the box leaves."""
    return count // 4 if count >= 8 else 0


def _centre(share: Float[Tensor, "b r n"], grid: Grid) -> Int[Tensor, "b r"]:
    """The cell in which the weighted centre of each part lies."""
    centre = share @ inside(grid).to(share.device, share.dtype)
    # where features are no numbers there is none, and a cell outside the grid would end the whole batch
    return flat((centre + 0.5).floor().nan_to_num().long(), grid)


def _shown(positions: Int[Tensor, "b m 3"], grid: Grid) -> Int[Tensor, "b n"]:
    """The token of each cell of the grid; where an earlier step left none, the one before it in reading order."""
    cell = flat(positions, grid)
    numbers = torch.arange(cell.shape[1], device=cell.device).expand_as(cell)
    held = torch.full((len(cell), math.prod(grid)), 0, device=cell.device).scatter_reduce_(1, cell, numbers, "amax")
    return held.cummax(dim=1).values


def _joined(frames: Sequence[Coded]) -> Coded:
    """Frames of one clip, one after another."""
    plane, starts = frames[0].owner.shape[1], accumulate((one.tokens.shape[1] for one in frames), initial=0)
    return Coded(
        torch.cat([one.tokens for one in frames], dim=1),
        torch.cat([one.cells + t * plane for t, one in enumerate(frames)], dim=1),
        torch.cat([one.owner + start for one, start in zip(frames, starts, strict=False)], dim=1),
        torch.cat([one.missed for one in frames], dim=1),
    )


def _evenly(compressed: Compressed, source: VisualTokens) -> Compressed:
    """Each token is made of all patches, and weighs as much as the next."""
    count, weight = len(compressed.tokens), compressed.tokens.weight
    even = (source.weight.float().sum() / count).to(weight.dtype).expand(count)
    return replace(compressed, tokens=replace(compressed.tokens, weight=even))
