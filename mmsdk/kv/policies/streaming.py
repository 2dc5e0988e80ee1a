"""The first tokens and the last ones, at positions inside the cache (StreamingLLM, Xiao et al., arXiv 2309.17453).

A softmax has to put its weight somewhere, and models learn to put what they do not need on their first tokens: with these `sinks` kept, a
sliding window does not break down.

[published] the sinks and the last tokens stay, `keep` together; positions are those in the cache, so that a sink stands right in front
of the window however much has gone in between. [ours] keys of the window stay as they are and those of the sinks are turned forward
instead, always from their originals: only distances count, nothing is computed for the window, and no rounding adds up. Where a method
left gaps between positions inside the window they stay. The prompt is read exactly, and becomes a window when it has been read. Where
positions are to be given again, as in a stream without end, the window goes back to right behind where the sinks were at first.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import BudgetError, ModelError
from mmsdk.kv.entries import Entries
from mmsdk.kv.policy import Ask

__all__ = ["Streaming"]


@dataclass(frozen=True, slots=True)
class Streaming:
    """`sinks` first tokens beside the last ones."""

    sinks: int = 4
    interval: int = 1
    dense: int = 0

    def __post_init__(self) -> None:
        if self.sinks < 1:
            raise BudgetError(f"streaming keeps at least one first token, got sinks={self.sinks}; window keeps none")

    @property
    def early(self) -> bool:
        """A new token sees the window that it is the last of."""
        return True

    @property
    def gapless(self) -> bool:
        """Sinks stand right in front of the window."""
        return True

    @property
    def latents(self) -> bool:
        """Only age counts; of a latent's entry the rotated part is moved."""
        return True

    def observe(self, entries: Entries, query: Float[Tensor, "b h s d"], ask: Ask) -> None:
        """Where new tokens stand along the first axis: sinks are moved along all axes by as much.

        Raises ModelError where frequencies follow the length of a row: keys of one row are then turned by several.
        """
        if ask.turning.growing:
            raise ModelError("streaming turns keys to other positions, which this model's rotary scaling forbids; choose window")
        before = entries.columns.get("place", torch.zeros_like(entries.positions))
        entries.columns["place"] = torch.cat((before[:, :, : -ask.places.shape[1]], ask.places[:, None]), dim=2)

    def scores(self, entries: Entries, keep: Int[Tensor, " b"]) -> Int[Tensor, "b 1 t"]:
        """By age, but that the newest comes first and the sinks next."""
        order, last = entries.order, entries.lengths[..., None] - 1
        aged = torch.where(order < self.sinks, 2 * entries.count - order, order)
        return torch.where(order == last, 3 * entries.count, aged)

    def move(self, entries: Entries) -> None:
        """Turn the sinks to right in front of the window."""
        at, wide = self._at(entries)
        place, position = entries.columns["place"][:, 0], entries.positions[:, 0]
        keys = self._original(entries, "sinks", entries.keys.gather(2, wide))
        places = self._original(entries, "sink_places", place.gather(1, at))
        positions = self._original(entries, "sink_positions", position.gather(1, at))
        by, further = (self._gap(entries, at, *pair) for pair in ((place, places), (position, positions)))
        entries.notes["gap"], entries.notes["turned"] = further, by
        entries.keys.scatter_(2, wide, entries.turning.further(keys, by[:, None, None].expand(-1, 1, self.sinks)))
        position.scatter_(1, at, positions + further[:, None])
        entries.columns["place"] = place.scatter(1, at, places + by[:, None])[:, None]

    def close_up(self, entries: Entries, ahead: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        """Everything goes back by as much as the sinks were moved, which then are their originals again: in them, no rounding adds up."""
        if "gap" not in entries.notes:
            return ahead
        _, wide = self._at(entries)
        gap, turned, sinks = (entries.notes[name] for name in ("gap", "turned", "sinks"))
        entries.columns["place"] = entries.columns["place"] - turned[:, None, None]
        entries.place((entries.positions - gap[:, None, None]).where(entries.valid, -1), turned - gap)
        entries.keys.scatter_(2, wide, sinks)
        return ahead + gap - turned

    def _at(self, entries: Entries) -> tuple[Int[Tensor, "b k"], Int[Tensor, "b g k d"]]:
        """Which entries of each row are the sinks, and the same for each number of their keys."""
        blank = (entries.order[:, 0] < 0).sum(1, keepdim=True)
        at = (blank + torch.arange(self.sinks, device=blank.device)).clamp_max(entries.count - 1)
        return at, at[:, None, :, None].expand(-1, *entries.keys.shape[1:2], -1, entries.keys.shape[3])

    def _original(self, entries: Entries, name: str, now: Tensor) -> Tensor:
        """What the sinks were before they were first moved: until something goes, that is what they are now."""
        moved = entries.notes.get("gap", torch.zeros(len(now), dtype=torch.long, device=now.device)) > 0
        entries.notes[name] = torch.where(moved.view(-1, *(1,) * (now.ndim - 1)), entries.notes.get(name, now), now)
        return entries.notes[name]

    def _gap(self, entries: Entries, at: Int[Tensor, "b k"], here: Int[Tensor, "b t"], original: Int[Tensor, "b k"]) -> Int[Tensor, " b"]:
        """How far the window's first token has gone from the last sink; 0 for rows that have no window yet."""
        window = (at[:, -1:] + 1).clamp_max(entries.count - 1)
        gap = here.gather(1, window)[:, 0] - original[:, -1] - 1
        return gap.masked_fill(entries.lengths[:, 0] <= self.sinks, 0).clamp_min(0)
