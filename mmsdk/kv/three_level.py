"""A memory of three levels: the last tokens as they are, entries for every few tokens, entries for every many (DeepSeek-V4, section 2.3).

    layer          exact           compressed
    sliding        last n tokens   -
    CSA            last n tokens   n_tokens / m entries, and as many keys of the indexer that picks among them
    HCA            last n tokens   n_tokens / m' entries

With n = 128, m = 4 and m' = 128, an HCA layer remembers a million tokens in 7,812 entries. Keys are the values too. What is compressed, and
by which weights, the layer says (`collect`, `extend`); the cache knows which windows are complete in which row.

Entries are only ever added behind one another, so that a `mark` of an earlier state is small: the window, what waits, and how long the rows
were. `cut` goes back to one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mmsdk.errors import InputError
from mmsdk.kv.open_windows import Completed, Series, Tokens, Waiting
from mmsdk.kv.types import LayerView
from mmsdk.kv.window import Window

__all__ = ["Plan", "ThreeLevelCache"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the layers of a model remember: a window of `window` tokens of `width` numbers in all of them, and each one's series."""

    window: int
    width: int
    series: tuple[tuple[Series, ...], ...]


# A conversation marks every turn; the earliest marks make room.
_MARKS = 8


@dataclass(frozen=True, slots=True)
class Mark:
    """A state of a cache, but for the entries, of which it had the first ones that there are now."""

    windows: tuple[Window, ...]
    waiting: tuple[tuple[Waiting, ...], ...]
    tokens: Tokens

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps."""
        return sum(window.nbytes for window in self.windows) + sum(one.nbytes for layer in self.waiting for one in layer)


class ThreeLevelCache:
    """Implements `mmsdk.kv.types.KVCache` for a plan. All layers see the same tokens, numbered from 0 without a gap in every row.

    A pass looks at its positions once, [b] numbers that the host waits for. What is stored carries no gradient. A fork shares complete
    entries, which never change, and copies the rest, which is small.
    """

    def __init__(
        self, plan: Plan, windows: list[Window], waiting: list[list[Waiting]], entries: list[list[Tensor]], tokens: Tokens
    ) -> None:
        self._plan = plan
        self._windows = windows
        self._waiting = waiting
        self._entries = entries
        self._tokens = tokens
        self._position = torch.tensor(tokens.after, device=tokens.positions.device)
        # Whether spare entries may be filled in place: not where a parent may fill them too.
        self._extendable = [[True] * len(blocks) for blocks in entries]
        # Whether a fork may still read entries that going back would let this one write over.
        self._forked = False
        self._marks: tuple[Mark, ...] = ()

    @classmethod
    def allocate(cls, plan: Plan, rows: int, capacity: int, dtype: torch.dtype, device: torch.device | str) -> "ThreeLevelCache":
        """An empty cache with room for the entries of `capacity` tokens a row; more double it. Raises InputError for sizes below one."""
        for name, size in (("rows", rows), ("capacity", capacity)):
            if size < 1:
                raise InputError(f"it is {size}, it must be at least 1", item=name)
        where = torch.device(device)
        return cls(
            plan,
            [Window.empty(plan.window, plan.width, rows, dtype, where) for _ in plan.series],
            [[Waiting.empty(one, rows, dtype, where) for one in layer] for layer in plan.series],
            [[torch.empty(rows, capacity // one.rate, one.width, dtype=dtype, device=where) for one in layer] for layer in plan.series],
            _standing((0,) * rows, where),
        )

    @staticmethod
    def joined(caches: Sequence["ThreeLevelCache"]) -> "ThreeLevelCache":
        """The rows of several caches of one plan as one batch: a copy. Raises InputError for caches of different plans."""
        first = caches[0]
        if any(cache._plan != first._plan for cache in caches):
            raise InputError("they are of different models", item="caches")
        places = [(layer, place) for layer, own in enumerate(first._plan.series) for place in range(len(own))]
        entries: list[list[Tensor]] = [[] for _ in first._plan.series]
        waiting: list[list[Waiting]] = [[] for _ in first._plan.series]
        for layer, place in places:
            room = max(cache._entries[layer][place].shape[1] for cache in caches)
            entries[layer].append(torch.cat([_filled(cache.entries(layer, place), room) for cache in caches]))
            waiting[layer].append(Waiting.joined([cache._waiting[layer][place] for cache in caches]))
        windows = [Window.joined([cache._windows[layer] for cache in caches]) for layer in range(len(first._windows))]
        lengths = tuple(length for cache in caches for length in cache._tokens.after)
        return ThreeLevelCache(first._plan, windows, waiting, entries, _standing(lengths, first._position.device))

    @property
    def position(self) -> Int[Tensor, " b"]:
        """Tokens seen of each row."""
        return self._position

    def next(self, layer: int) -> Int[Tensor, " b"]:
        """The same in every layer."""
        return self._position

    @property
    def shift(self) -> Int[Tensor, " b"]:
        """0: heads turn along one axis."""
        return torch.zeros_like(self._position)

    def turn(self, following: Int[Tensor, " b"]) -> None:
        """Raises InputError: windows are counted in tokens, whatever axes they have."""
        raise InputError("its tokens are numbered along one axis; use DenseCache for pictures along several", item="ThreeLevelCache")

    @property
    def nbytes(self) -> int:
        """Bytes allocated, spare entries included."""
        return sum(self.levels().values())

    @property
    def span(self) -> int:
        """Entries of all levels, layers and rows: of a row with n tokens its window and n / rate of each series."""
        series = [one for layer in self._plan.series for one in layer]
        lengths = self._tokens.after
        near = len(self._windows) * sum(min(length, self._plan.window) for length in lengths)
        return near + sum(length // one.rate for length in lengths for one in series)

    def levels(self) -> dict[str, int]:
        """Bytes allocated for each level: "window", "waiting" (tokens of open windows), and each series of the plan by its level.

        Where states were marked there are "marks", too.
        """
        held = {"window": sum(window.nbytes for window in self._windows)}
        held["waiting"] = sum(one.nbytes for layer in self._waiting for one in layer)
        for layer, blocks in zip(self._plan.series, self._entries, strict=True):
            for series, block in zip(layer, blocks, strict=True):
                held[series.level] = held.get(series.level, 0) + block.nbytes
        return held | ({"marks": sum(mark.nbytes for mark in self._marks)} if self._marks else {})

    def advance(self, positions: Int[Tensor, "b s"], layers: range | None = None) -> None:
        """Announce s new tokens. A position of -1 marks padding.

        Raises InputError for another number of rows, for a part of the layers, and where a row's tokens are not numbered without a gap.
        """
        if len(positions) != len(self._position):
            raise InputError(f"there are {len(positions)}, the cache has {len(self._position)}", item="rows")
        if layers is not None and layers != range(len(self._windows)):
            raise InputError(f"{layers} are a part of {len(self._windows)}; all see the same tokens", item="layers")
        real = positions >= 0
        after = self._position + real.sum(1)
        fitting = (positions == torch.where(real, self._position[:, None] + real.cumsum(1) - 1, -1)).all(1)
        counts, fits = torch.stack((after, fitting.long())).tolist()
        for row, fit in enumerate(fits):
            if not fit:
                raise InputError(f"the positions of its new tokens do not go on from {self._tokens.after[row]} one by one", index=row)
        self._tokens, self._position = Tokens(positions, self._tokens.after, tuple(counts)), after

    def append(self, layer: int, keys: Float[Tensor, "b 1 s d"], values: Float[Tensor, "b 1 s d"]) -> LayerView:
        """Store the new tokens of one layer in its window; the view is the window before them and the tokens. Values are the keys."""
        return self._windows[layer].append(self._tokens, keys[:, 0].detach())

    def view(self, layer: int) -> LayerView:
        """The exact level of a layer: its window."""
        return self._windows[layer].view(self._tokens)

    def collect(self, layer: int, series: int, content: Float[Tensor, "b s c"], gates: Float[Tensor, "b s c"]) -> Completed | None:
        """Take the projected new tokens of a series; gives the windows that they complete, to be compressed and given to `extend`."""
        return self._waiting[layer][series].add(self._tokens, content.detach(), gates.detach())

    def extend(self, layer: int, series: int, completed: Completed, entries: Float[Tensor, "b w d"]) -> None:
        """Store the entries of the windows that `collect` gave; those of windows that are not complete are left out."""
        rate, tokens = self._plan.series[layer][series].rate, self._tokens
        self._reserve(layer, series, max(tokens.after) // rate)
        block, count = self._entries[layer][series], completed.count
        if tokens.in_step:
            start = tokens.before[0] // rate
            block[:, start : start + count] = entries.detach()
            return
        # a row that is behind the others has columns without an entry, which are masked and must be finite all the same
        block[:, max(tokens.before) // rate : max(tokens.after) // rate] = 0
        counts = torch.tensor(tokens.windows(rate))
        rows = torch.arange(len(counts)).repeat_interleave(counts)
        columns = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
        rows, columns = rows.to(block.device), columns.to(block.device)
        block[rows, completed.first[rows] + columns] = entries.detach()[rows, columns]

    def entries(self, layer: int, series: int) -> Float[Tensor, "b t d"]:
        """The entries of a series, as many as the longest row has; of a row with n tokens the first n / rate are its own."""
        return self._entries[layer][series][:, : max(self._tokens.after) // self._plan.series[layer][series].rate]

    def settled(self, layer: int, series: int) -> int:
        """Entries that every new token of the last pass sees."""
        return min(self._tokens.before) // self._plan.series[layer][series].rate

    def keep(self, layer: int, index: Int[Tensor, "b k"]) -> None:
        """Raises InputError: what stays is decided by the levels."""
        raise InputError("its levels decide what stays; use DenseCache to thin by a policy", item="ThreeLevelCache")

    def mark(self) -> None:
        """Remember where all rows are now, so that `cut` can go back to it. The last eight marks are kept."""
        everyone = torch.arange(len(self._position), device=self._position.device)
        windows = tuple(window.select(everyone) for window in self._windows)
        waiting = tuple(tuple(one.select(everyone) for one in layer) for layer in self._waiting)
        marks = [mark for mark in self._marks if mark.tokens.after != self._tokens.after]
        self._marks = (*marks, Mark(windows, waiting, _standing(self._tokens.after, self._position.device)))[-_MARKS:]

    def cut(self, tokens: int) -> int:
        """Forget all but the first so many tokens of every row, or fewer: back to the latest mark that has no more; how many are left.

        Of rows that are as long as each other. Where nothing was marked early enough all is forgotten.
        """
        if max(self._tokens.after) <= tokens:
            return max(self._tokens.after)
        self._marks = tuple(mark for mark in self._marks if max(mark.tokens.after) <= tokens)
        everyone = torch.arange(len(self._position), device=self._position.device)
        if self._marks:
            mark = self._marks[-1]
            self._windows = [window.select(everyone) for window in mark.windows]
            self._waiting = [[one.select(everyone) for one in layer] for layer in mark.waiting]
            self._tokens = mark.tokens
        else:
            self._windows = [window.emptied() for window in self._windows]
            self._waiting = [[one.emptied() for one in layer] for layer in self._waiting]
            self._tokens = _standing((0,) * len(self._position), self._position.device)
        self._position = torch.tensor(self._tokens.after, device=self._position.device)
        if self._forked:
            self._extendable = [[False] * len(blocks) for blocks in self._entries]
            self._forked = False
        return max(self._tokens.after)

    def fork(self) -> "ThreeLevelCache":
        """A continuation that shares the entries so far; this cache may go on as well, and neither sees the other's tokens."""
        rows = torch.arange(len(self._position), device=self._position.device)
        child = self._of(rows, [list(blocks) for blocks in self._entries])
        child._extendable = [[False] * len(blocks) for blocks in self._entries]
        self._forked = True
        return child

    def select(self, rows: Int[Tensor, " r"]) -> "ThreeLevelCache":
        """A copy of these rows."""
        return self._of(rows, [[block[rows] for block in blocks] for blocks in self._entries])

    def _of(self, rows: Int[Tensor, " r"], entries: list[list[Tensor]]) -> "ThreeLevelCache":
        chosen = rows.tolist()
        before, after = (tuple(counts[row] for row in chosen) for counts in (self._tokens.before, self._tokens.after))
        waiting = [[one.select(rows) for one in layer] for layer in self._waiting]
        tokens = Tokens(self._tokens.positions[rows], before, after)
        return ThreeLevelCache(self._plan, [window.select(rows) for window in self._windows], waiting, entries, tokens)

    def _reserve(self, layer: int, series: int, needed: int) -> None:
        """Room for so many entries, in memory that no other cache fills."""
        block = self._entries[layer][series]
        if self._extendable[layer][series] and block.shape[1] >= needed:
            return
        capacity = block.shape[1] if block.shape[1] >= needed else max(needed, 2 * block.shape[1])
        own = block.new_empty(block.shape[0], capacity, block.shape[2])
        own[:, : block.shape[1]] = block
        self._entries[layer][series] = own
        self._extendable[layer][series] = True


def _standing(lengths: tuple[int, ...], device: torch.device) -> Tokens:
    """No new token of rows that have so many already."""
    return Tokens(torch.empty(len(lengths), 0, dtype=torch.long, device=device), lengths, lengths)


def _filled(entries: Float[Tensor, "b t d"], room: int) -> Float[Tensor, "b r d"]:
    """With so many columns: a row that is behind the others has some without an entry, which are masked and must be finite all the same."""
    return F.pad(entries, (0, 0, 0, room - entries.shape[1]))
