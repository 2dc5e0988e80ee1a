"""Rows that remember in three levels (`mmsdk.kv.tiers`), side by side: each in levels of its own, all read at one time.

    exact   . . . [first | mid | window]      one pool, in which the last tokens of all rows end in the same column
    means   [first | mid | far] . . .         one sheet, in which an exact token counts as a mean of one

Rows have other lengths, budgets, blocks and choices among them; what one has less than another is masked. New tokens are written by one
copy, and a query goes once to the sheet, once to the blocks that it recalls and once to the window, whatever the number of rows. Levels
move in the store of the row, which looks at the pool while it is here: that is the only work row by row, once in many tokens.

Letters: b rows, h heads, g key-value heads, s new tokens, c columns of the pool, n of the sheet, k blocks recalled, d width.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kernels.ops.block_gather import block_gather
from mmsdk.kv.entries import Arriving
from mmsdk.kv.merging import Means, Partial, joined, over, scores
from mmsdk.kv.policy import Ask, LayerStore
from mmsdk.kv.tiers import Tiers, exact, weighty
from mmsdk.kv.types import LayerView

__all__ = ["FEW", "TierRows", "joinable"]

FEW = 16
"""New tokens of a row that are read with those of others: prompts are not."""

# Columns that the sheet has to spare, since a row's means come by some at a time.
_SPARE = 8


def joinable(rows: Sequence[LayerStore]) -> tuple[Tiers, ...]:
    """The rows, where they may be read together; none of them where not."""
    found = tuple(row for row in rows if isinstance(row, Tiers) and row.steady)
    alike = len(found) == len(rows) > 1 and len({row.levels.block for row in found}) == 1
    return found if alike else ()


class TierRows:
    """Takes over the stores of single rows, which have read their prompts; `part` before anybody looks at one of them."""

    def __init__(self, rows: Sequence[Tiers]) -> None:
        self._rows = tuple(rows)
        self._block = rows[0].levels.block
        # tokens that came since rows were told, and how many may come before one of them moves its levels
        self._added, self._room, self._ordered, self._end = 0, 0, True, 0
        self._turn: tuple[Ask, ...] = ()
        self._pool()

    def append(self, new: Arriving, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"]) -> None:
        """See `mmsdk.kv.policy.LayerStore`."""
        s = keys.shape[2]
        if self._end + s > self._keys.shape[2]:
            self.part()
            self._pool()
        here = slice(self._end, self._end + s)
        self._keys[:, :, here], self._values[:, :, here] = keys.detach(), values.detach()
        self._positions[:, 0, here] = new.positions
        self._end, self._added, self._room = self._end + s, self._added + s, self._room - s
        self._ordered = self._ordered and new.ordered

    def attend(self, query: Float[Tensor, "b h s d"], ask: Ask) -> Float[Tensor, "b h s d"]:
        """See `mmsdk.kv.policy.LayerStore`."""
        self._turn = (ask,)
        out = self._over_levels(query, ask) if self._sheet.count else ask.attend(query, self._view())
        if self._room < 0:
            self._age()
        return out

    def part(self) -> None:
        """Tell every row what came to it."""
        for place, row in enumerate(self._rows if self._added else ()):
            row.told(self._added, self._ordered)
            for ask in self._turn:
                row.levels.entries.turning = ask.row(place).turning
        self._added = 0

    def _view(self) -> LayerView:
        """All of the pool that is in use."""
        here = slice(self._low, self._end)
        positions = self._positions[:, 0, here]
        valid = positions >= 0
        return LayerView(self._keys[:, :, here], self._values[:, :, here], positions, valid, valid.sum(1), self._whole and self._ordered)

    def _over_levels(self, query: Float[Tensor, "b h s d"], ask: Ask) -> Float[Tensor, "b h s d"]:
        g, s, parts = self._keys.shape[1], query.shape[2], list[Partial]()
        asking = query.unflatten(1, (g, -1)).flatten(1, 3)
        found = scores(asking, self._sheet)
        if self._most:
            index = self._recalled(found)
            there = torch.zeros(*index.shape[:2], self._blocks + 1, dtype=torch.bool, device=index.device)
            there = there.scatter_(2, index.where(index >= 0, self._blocks), True)[..., :-1]
            mids = slice(self._ahead, self._ahead + self._blocks)
            found[..., mids] = found[..., mids].masked_fill(there[:, :, None], -torch.inf)
            here = slice(self._low, self._end)
            valid, nothing = self._positions[:, 0, here] >= 0, torch.zeros(index.shape, device=index.device)
            originals = self._keys[:, :, here], self._values[:, :, here], index, nothing, valid
            parts.append(block_gather(asking, *originals, self._begins - self._low, self._block, query.shape[3] ** -0.5))
        parts.append(over(asking, self._sheet.values, found))
        here = slice(self._near, self._end)
        positions = self._positions[:, :, here]
        late = torch.arange(self._near, self._end, device=positions.device) >= self._opens[:, None]
        seen = (positions >= 0) & late[:, None] & (positions <= ask.positions[:, :, None])
        parts.append(exact(asking, self._keys[:, :, here], self._values[:, :, here], seen))
        out: Tensor = joined(parts).unflatten(1, (-1, s))
        return out

    def _recalled(self, found: Float[Tensor, "b g r n"]) -> Int[Tensor, "b g k"]:
        """The blocks that each row recalls, -1 where it recalls fewer than another."""
        mids = slice(self._ahead, self._ahead + self._blocks)
        own = torch.arange(self._blocks, device=found.device) < self._mids[:, None]
        sizes = self._sheet.sizes[:, mids].where(own, 0)
        weights = weighty(found[..., mids].masked_fill(~own[:, None, None], -torch.inf), sizes)
        best = weights.topk(self._most, dim=-1)
        fewer = torch.arange(self._most, device=found.device) >= self._counts[:, None]
        index: Tensor = best.indices.masked_fill(fewer[:, None] | (best.values == -torch.inf), -1)
        return index

    def _age(self) -> None:
        """Move the levels of the rows that are due, and take what is left of them back."""
        self.part()
        fits = True
        for place, row in enumerate(self._rows):
            if row.room < 0:
                row.age()
                fits = fits and self._put(place, row)
        if fits:
            self._measure()
        else:
            self._pool()

    def _pool(self) -> None:
        """One pool for what rows hold, with columns to spare, and one sheet."""
        levels = [row.levels for row in self._rows]
        count, means = max(one.entries.count for one in levels), max(one.count for one in levels)
        like, b = levels[0].entries.keys, len(levels)
        spare = max(row.interval for row in self._rows)
        self._keys, self._values = (x.new_empty(b, *x.shape[1:2], count + spare, x.shape[3]) for x in (like, levels[0].entries.values))
        self._positions = torch.full((b, 1, count + spare), -1, device=like.device)
        self._end, self._ahead = count, max(one.first for one in levels)
        n = self._ahead + means + (_SPARE if means else 0) if any(one.count or one.first for one in levels) else 0
        keys, values = (torch.zeros_like(x[:, :, :1]).expand(-1, -1, n, -1).clone() for x in (self._keys, self._values))
        sizes = torch.zeros(b, n, dtype=torch.long, device=like.device)
        self._sheet = Means(keys, values, sizes, torch.full_like(sizes, -1))
        for place, row in enumerate(self._rows):
            fits = self._put(place, row)
            assert fits, "a pool is as large as what it is for"
        self._measure()

    def _put(self, place: int, row: Tiers) -> bool:
        """Bring what a row holds to its place in pool and sheet, and let it look there; False where that is too small."""
        levels, here = row.levels, slice(place, place + 1)
        entries, begin, n = levels.entries, self._end - levels.entries.count, self._ahead + levels.count
        if begin < 0 or n > self._sheet.count or levels.first > self._ahead:
            return False
        for pool, x in ((self._keys, entries.keys), (self._values, entries.values), (self._positions, entries.positions)):
            pool[here, :, begin : self._end] = x
            # what nobody owns is multiplied by 0 and must be a number
            pool[here, :, :begin] = -1 if pool is self._positions else 0
        entries.lie(self._keys[here], self._values[here], self._positions[here], begin)
        sheet = self._sheet.rows(here)
        sheet.sizes.zero_()
        if levels.first:
            sheet.part(0, levels.first).put(levels.front)
        if levels.means:
            sheet.part(self._ahead, n).put(levels.means[0])
            row.lie(sheet.part(self._ahead, n))
        return True

    def _measure(self) -> None:
        """Where levels of rows begin, in columns; what the host must know is known without asking the device."""
        levels = [row.levels for row in self._rows]
        begins = [self._end - one.entries.count for one in levels]
        first = [begin + one.first for begin, one in zip(begins, levels, strict=True)]
        opens = [start + one.mid * self._block for start, one in zip(first, levels, strict=True)]
        self._low, self._near = min(begins), min(opens)
        self._whole, self._ordered = min(begins) == max(begins) and all(one.entries.whole for one in levels), True
        self._blocks, self._most = max(one.mid for one in levels), max(one.recalled for one in levels)
        table = torch.tensor([first, opens, [one.mid for one in levels], [one.recalled for one in levels]])
        self._begins, self._opens, self._mids, self._counts = table.to(self._keys.device)
        self._room = min(row.room for row in self._rows)
