"""A series of compressed entries: those that are complete, and the tokens of the window that is still open.

Every `rate` tokens of a row make one entry. Until its window is complete a token waits with its content and its gates; where windows
overlap, the window before the open one waits too. So a series holds n / rate entries and fewer than 2 rate tokens, whatever n is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["Completed", "Series", "Tokens", "Waiting"]


@dataclass(frozen=True, slots=True)
class Series:
    """What is compressed: one entry of `width` numbers for `rate` tokens.

    A token is projected to `width` numbers, or to twice as many where windows overlap. Series of one `level` are counted together.
    """

    level: str
    width: int
    rate: int
    overlap: bool

    @property
    def projected(self) -> int:
        """Numbers a token waits with, for content and for gates each."""
        return self.width * (1 + self.overlap)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The new tokens of a pass: their positions, and how many tokens each row had `before` and has `after`, which the host knows."""

    positions: Int[Tensor, "b s"]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def in_step(self) -> bool:
        """Whether all rows are as long, and none has padding among the new tokens."""
        return len(set(self.before)) == 1 and all(end - start == self.positions.shape[1] for start, end in self.spans)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(before, after) of each row."""
        return tuple(zip(self.before, self.after, strict=True))

    def windows(self, rate: int) -> list[int]:
        """How many windows of `rate` tokens the new ones complete in each row."""
        return [end // rate - start // rate for start, end in self.spans]


@dataclass(frozen=True, slots=True)
class Completed:
    """Windows that a pass has completed, one behind the other; in overlapping series the one before them is in front.

    `first` is the number of each row's first. A row that has completed fewer than the others has windows at its end that are not complete.
    """

    content: Float[Tensor, "b windows m c"]
    gates: Float[Tensor, "b windows m c"]
    first: Int[Tensor, " b"]
    count: int


class Waiting:
    """The tokens [b, m or 2 m, c] of the open windows of every row, behind those of the window before them where windows overlap."""

    def __init__(self, series: Series, content: Float[Tensor, "b m c"], gates: Float[Tensor, "b m c"]) -> None:
        self._series = series
        self._content = content
        self._gates = gates

    @classmethod
    def empty(cls, series: Series, rows: int, dtype: torch.dtype, device: torch.device) -> "Waiting":
        """None; the gates of the window before the first are closed, so that it counts for nothing."""
        shape = rows, (1 + series.overlap) * series.rate, series.projected
        content = torch.zeros(shape, dtype=dtype, device=device)
        return cls(series, content, torch.full_like(content, -torch.inf))

    @property
    def nbytes(self) -> int:
        """Bytes of content and gates."""
        return self._content.nbytes + self._gates.nbytes

    def select(self, rows: Int[Tensor, " r"]) -> "Waiting":
        """A copy of these rows."""
        return Waiting(self._series, self._content[rows], self._gates[rows])

    @staticmethod
    def joined(parts: Sequence["Waiting"]) -> "Waiting":
        """The rows of several of one series: a copy."""
        content, gates = (torch.cat(tensors) for tensors in zip(*((part._content, part._gates) for part in parts), strict=True))
        return Waiting(parts[0]._series, content, gates)

    def emptied(self) -> "Waiting":
        """As it was before the first token."""
        like = self._content
        return Waiting.empty(self._series, len(like), like.dtype, like.device)

    def add(self, tokens: Tokens, content: Float[Tensor, "b s c"], gates: Float[Tensor, "b s c"]) -> Completed | None:
        """Let the new tokens wait, and hand over the windows that are complete with them; None where no row completes one."""
        rate, most = self._series.rate, max(tokens.windows(self._series.rate))
        place = self._in_step if tokens.in_step else self._anywhere
        whole, opened = place(tokens, most, self._content, content), place(tokens, most, self._gates, gates)
        if not most:
            return None
        shape = len(content), most + self._series.overlap, rate, self._series.projected
        first = torch.tensor([start // rate for start in tokens.before], device=content.device)
        return Completed(whole.view(shape), opened.view(shape), first, most)

    def _in_step(self, tokens: Tokens, most: int, held: Float[Tensor, "b m c"], new: Float[Tensor, "b s c"]) -> Float[Tensor, "b t c"]:
        """All rows alike, so that what waits, and what no longer does, are slices."""
        rate = self._series.rate
        behind, filled = self._series.overlap * rate, tokens.before[0] % rate
        if not most:
            held[:, behind + filled : behind + filled + new.shape[1]] = new
            return held[:, :0]
        canvas = torch.cat((held[:, : behind + filled], new), dim=1)
        left = canvas[:, most * rate :]
        held[:, : left.shape[1]] = left
        return canvas[:, : behind + most * rate]

    def _anywhere(self, tokens: Tokens, most: int, held: Float[Tensor, "b m c"], new: Float[Tensor, "b s c"]) -> Float[Tensor, "b t c"]:
        """Each row has its own place on a canvas that begins with what it holds; one more place takes the padding."""
        rate, device = self._series.rate, held.device
        behind, rows = self._series.overlap * rate, torch.arange(len(held), device=device)[:, None]
        starts = torch.tensor([start // rate * rate for start in tokens.before], device=device)[:, None]
        canvas = held.new_zeros(len(held), behind + (most + 1) * rate + 1, held.shape[2])
        canvas[:, : held.shape[1]] = held
        places = torch.where(tokens.positions < 0, canvas.shape[1] - 1, behind + tokens.positions - starts)
        canvas[rows, places] = new
        closed = torch.tensor(tokens.windows(rate), device=device)[:, None] * rate
        held.copy_(canvas[rows, closed + torch.arange(held.shape[1], device=device)])
        return canvas[:, : behind + most * rate]
