"""Which slots of a remembered block a reader looks at: the best of every camera by online attention scores, and the whole instruction.

Published (D2-VLA, arXiv 2609.34792): top-k per block and camera; the budget of a block is ceil(.7 x its visual slots), or an explicit
count; at least 4 of each camera are reserved (dealt in turn where the budget is smaller), the rest is shared in proportion; a masked
camera's share goes to nobody; one index set for all layers, keys and values; indices ascend, the earlier of equals stays.

Reconstruction: proportion is to what the reserve left of each camera, by largest remainder, the earlier camera first (538 of 3 x 256 are
180 + 179 + 179); scores that differ by less than a millionth of the row's largest are equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.errors import BudgetError, InputError
from mmsdk.kv.scoring import relative
from mmsdk.tokencomp.ranking import top
from mmsdk.tokencomp.share import at_least

__all__ = ["BlockLayout", "Selection", "quotas"]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """What stands where in every block: as many slots as each camera has, camera by camera, then `words` slots of the instruction.

    Published: 3 cameras of 256 and 200 words, 968 slots. Raises InputError where a camera has no slot.
    """

    cameras: tuple[int, ...] = (256, 256, 256)
    words: int = 200

    def __post_init__(self) -> None:
        if not self.cameras or min(self.cameras) < 1 or self.words < 0:
            raise InputError(f"cameras of {self.cameras} slots and {self.words} words; each camera has at least 1", item="layout")

    @property
    def visual(self) -> int:
        """Slots of all cameras."""
        return sum(self.cameras)

    @property
    def slots(self) -> int:
        """All slots."""
        return self.visual + self.words

    def shown(self, present: Bool[Tensor, "b c"]) -> Bool[Tensor, "b n"]:
        """Which visual slots are seen where these cameras are present."""
        sizes = torch.tensor(self.cameras, device=present.device)
        return present.repeat_interleave(sizes, dim=1, output_size=self.visual)


@dataclass(frozen=True, slots=True)
class Selection:
    """How much of a remembered block is read. `tokens`, where not 0, is the budget itself and takes the place of `ratio`.

    Raises BudgetError for a ratio outside (0, 1], or a negative count.
    """

    ratio: float = 0.7
    tokens: int = 0
    reserve: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1 or self.tokens < 0 or self.reserve < 0:
            raise BudgetError(f"{self}: the ratio is in (0, 1], tokens and reserve are whole numbers from 0", item="selection")

    def budget(self, layout: BlockLayout) -> int:
        """Visual slots read of each block. Raises BudgetError where more are asked for than there are."""
        if self.tokens > layout.visual:
            raise BudgetError(f"{self.tokens} tokens of a block, which has {layout.visual} visual slots", item="selection")
        return self.tokens or at_least(self.ratio, layout.visual)

    def index(self, scores: Float[Tensor, "b s"], valid: Bool[Tensor, "b s"], layout: BlockLayout) -> Int[Tensor, "b k"]:
        """The slots to read, ascending. Invalid ones come after all valid ones of their camera, and stay invalid where they are taken."""
        ranked = relative(scores, valid).masked_fill(~valid, -1)[:, : layout.visual].split(layout.cameras, dim=1)
        first, chosen = 0, list[Tensor]()
        for camera, count in zip(ranked, quotas(layout.cameras, self.budget(layout), self.reserve), strict=True):
            chosen.append(first + top(camera, count))
            first += camera.shape[1]
        words = torch.arange(layout.visual, layout.slots, device=scores.device)
        return torch.cat((*chosen, words.expand(len(scores), -1)), dim=1)


def quotas(cameras: Sequence[int], budget: int, reserve: int) -> tuple[int, ...]:
    """How many slots of each camera are read; together `budget`, which is at most all there are."""
    given = [0] * len(cameras)
    for _ in range(reserve):
        for camera, slots in enumerate(cameras):
            given[camera] += given[camera] < slots and sum(given) < budget
    left = [slots - count for slots, count in zip(cameras, given, strict=True)]
    rest, total = budget - sum(given), sum(left)
    exact = [Fraction(rest * slots, total) if total else Fraction(0) for slots in left]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(cameras)), key=lambda camera: shares[camera] - exact[camera])
    for camera in by_remainder[: rest - sum(shares)]:
        shares[camera] += 1
    return tuple(count + share for count, share in zip(given, shares, strict=True))
