"""FastVID: cut a clip where it changes, keep what the encoder attends to, and merge the rest of each segment into density anchors.

Source: FastVID, arXiv 2503.11187. Published: cuts where adjacent frames are less alike than 0.9, and at the c - 1 least alike (c = 8
segments at least); a share 1 - d (d = 0.4) of each frame's tokens by attention; anchors in every p-th frame (p = 4, counted from the end
of the segment) by density peaks over 4 neighbours among the tokens left; an anchor becomes 0.6 of itself and 0.4 of the mean of its group,
itself included. The random noise that the published program adds to the density is left out. Ours: the budget is met exactly, so shares
are spread over frames by whole numbers, an anchor frame having as many as the frames it stands for, and there is at least one anchor; a
frame is known by the mean of its tokens where it has no pooled feature; a token joins the one most similar anchor of its segment
(published: one in every anchor frame), or of the clip where the segment got none. A picture is a clip of one frame.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.errors import PluginError
from mmsdk.kernels.ops.assign_and_merge import weighted_merge
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.density import density_peaks
from mmsdk.tokencomp.ranking import first_in_tiers, rescaled, top, top_within
from mmsdk.tokencomp.share import at_most
from mmsdk.tokencomp.similarity import best_match, rows_at, unit
from mmsdk.tokencomp.stack import Stack, in_stacks
from mmsdk.tokencomp.types import Compressed, Side
from mmsdk.vision.types import VisualTokens

__all__ = ["FastVID"]


@dataclass(frozen=True, slots=True)
class FastVID:
    """Published names: `merged` d, `threshold` tau, `segments` c, `stride` p, `neighbours` k, `anchor` the anchor's own weight."""

    side: ClassVar[Side] = "before"
    asks: ClassVar[bool] = False

    merged: float = 0.4
    threshold: float = 0.9
    segments: int = 8
    stride: int = 4
    neighbours: int = 4
    anchor: float = 0.6

    def __post_init__(self) -> None:
        if not (0 <= self.merged <= 1 and 0 <= self.anchor <= 1 and min(self.segments, self.stride, self.neighbours) >= 1):
            raise PluginError(f"fastvid takes merged and anchor in [0, 1] and segments, stride, neighbours >= 1, got {self}")

    def __call__(
        self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget], query: Sequence[Float[Tensor, "_ d"]] | None = None
    ) -> list[Compressed]:
        """Raises InputError for tokens without saliency."""
        return in_stacks("fastvid", tokens, budgets, self._compress)

    def _compress(self, stack: Stack) -> list[Compressed]:
        x, saliency, frame = stack.features().float(), stack.saliency(), stack.positions()[..., 0]
        anchors = max(1, at_most(self.merged, stack.count))
        cut = self._cuts(x, frame, stack.grid[0])
        salient = _salient(saliency, frame, stack.grid[0], stack.count - anchors)
        free = torch.ones_like(frame, dtype=torch.bool).scatter(1, salient, False)
        anchor = self._anchors(self._peaks(x, frame, free, stack.grid), frame, free, cut, anchors)
        labels, at = _joined(x, frame, cut, salient, anchor)
        features = [self._blended(*plan, salient.shape[1]) for plan in zip(stack.items, labels, at, strict=True)]
        return stack.merge(labels, at, features, saliency)

    def _cuts(self, x: Float[Tensor, "b n d"], frame: Int[Tensor, "b n"], frames: int) -> Bool[Tensor, "b t"]:
        """Whether a segment ends with each frame; the last one always ends one."""
        seen = unit(weighted_merge(x, frame, frames)[0])
        alike = (seen[:, :-1] * seen[:, 1:]).sum(dim=2)
        least = top(-alike, min(self.segments, frames) - 1)
        return torch.cat([(alike < self.threshold).scatter(1, least, True), alike.new_ones(len(x), 1, dtype=torch.bool)], dim=1)

    def _peaks(
        self, x: Float[Tensor, "b n d"], frame: Int[Tensor, "b n"], free: Bool[Tensor, "b n"], grid: tuple[int, int, int]
    ) -> Float[Tensor, "b n"]:
        """The density peak score of each free token within its frame."""
        frames, size = grid[0], grid[1] * grid[2]
        if x.shape[1] != frames * size:
            return density_peaks(x, frame, free, groups=frames, neighbours=self.neighbours)
        # a full grid falls apart into frames of equal size, and pairs across frames need not be looked at
        x, free = x.unflatten(1, (frames, size)).flatten(0, 1), free.unflatten(1, (frames, size)).flatten(0, 1)
        one = torch.zeros_like(free, dtype=torch.int64)
        return density_peaks(x, one, free, groups=1, neighbours=self.neighbours).reshape(frame.shape)

    def _anchors(
        self, score: Float[Tensor, "b n"], frame: Int[Tensor, "b n"], free: Bool[Tensor, "b n"], cut: Bool[Tensor, "b t"], count: int
    ) -> Int[Tensor, "b a"]:
        """The free tokens of highest score in the anchor frames; more of these, then other frames, where those run out."""
        frames = cut.shape[1]
        # a stride beyond the clip is that of the whole clip, and as a number may be beyond what a tensor holds
        stride = min(self.stride, frames)
        number = torch.arange(frames, device=cut.device).expand(len(cut), -1)
        end = torch.where(cut, number, frames).flip(1).cummin(dim=1).values.flip(1)
        start = torch.where(cut, number + 1, 0).roll(1, dims=1).index_fill(1, number[0, :1], 0).cummax(dim=1).values
        is_anchor = (end - number) % stride == 0
        begin = torch.maximum(start, number - stride + 1)
        quota = torch.where(is_anchor, count * (number + 1) // frames - count * begin // frames, 0)
        score = score.masked_fill(~free, -1.0)
        chosen = top_within(score, frame, quota)
        tier = torch.where(chosen, 0, torch.where(is_anchor.gather(1, frame), 1, 2)).masked_fill(~free, 3)
        return first_in_tiers(tier, score, count, tiers=4)

    def _blended(self, item: VisualTokens, labels: Int[Tensor, " n"], at: Int[Tensor, " m"], salient: int) -> Float[Tensor, "m d"]:
        """Salient tokens as they are, anchors mixed with the means of their groups."""
        x, (means, _) = item.features.float(), weighted_merge(item.features[None], labels[None], len(at), item.weight[None])
        return torch.cat([x[at[:salient]], self.anchor * x[at[salient:]] + (1 - self.anchor) * means[0, salient:]])


def _salient(saliency: Float[Tensor, "b n"], frame: Int[Tensor, "b n"], frames: int, count: int) -> Int[Tensor, "b s"]:
    """The most attended tokens of each frame, as evenly many from each as whole numbers allow."""
    number = torch.arange(frames, device=frame.device)
    quota = count * (number + 1) // frames - count * number // frames
    score = rescaled(saliency)
    tier = (~top_within(score, frame, quota.expand(len(frame), -1))).long()
    return first_in_tiers(tier, score, count, tiers=2)


def _joined(
    x: Float[Tensor, "b n d"], frame: Int[Tensor, "b n"], cut: Bool[Tensor, "b t"], salient: Int[Tensor, "b s"], anchor: Int[Tensor, "b a"]
) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b m"]]:
    """The group of every token and the token at which each group stands: salient ones alone, then the anchors with their followers."""
    z = unit(x)
    # the segment of a frame is the number of cuts before it
    segment = (cut.cumsum(dim=1) - cut.long()).gather(1, frame)
    apart = segment[..., None] != segment.gather(1, anchor)[:, None]
    _, match = best_match(z, rows_at(z, anchor), apart)
    at = torch.cat([salient, anchor], dim=1)
    numbers = torch.arange(at.shape[1], device=at.device).expand_as(at)
    return (match + salient.shape[1]).scatter(1, at, numbers), at
