"""Units by modality, kept by what they are worth, in pages by how long they are likely to stay (OmniTide: OmniPick, OmniPage).

    worth of a unit = w_kind * (attention of its tokens) * decay ^ (units that have come since)

OmniPick: when a layer holds too much, units of least worth are thinned to a share of their tokens, edges first; when all are thin, units
are dropped. OmniPage: words, first tokens and edges lie in one arena, the inside of pictures and clips in another, whose pages are joined
when they get empty (`mmsdk.kv.arenas`).

[published, abstract] a unit abstraction for streams of several modalities; context kept by unit boundaries and importance of modalities;
the cache divided physically by likelihood to stay, survivors compacted. [reconstruction] the rest: the worth, weights of 1 for words and a
half for what is seen (there is no sound here), units of at most 64 tokens of one kind in a row, attention followed by a moving mean over
one token in 8, the first 4 and the last 16 tokens pinned, a half left of a thinned unit, pages of 16 joined when less than half full. The
paper's speeds and gains are its own.
"""

from dataclasses import dataclass

from mmsdk.errors import BudgetError
from mmsdk.kv.arenas import Arenas, Tide
from mmsdk.kv.policy import Amount
from mmsdk.kv.units import Picking

__all__ = ["Omnitide"]


@dataclass(frozen=True, slots=True)
class Omnitide:
    """`word` and `sight` weigh kinds, `share` of a thinned unit stays, `interval` tokens may come before a layer is thinned again."""

    word: float = 1.0
    sight: float = 0.5
    share: float = 0.5
    decay: float = 0.98
    unit: int = 64
    page: int = 16
    sinks: int = 4
    recent: int = 16
    interval: int = 32
    sample: int = 8
    follow: float = 0.3

    def __post_init__(self) -> None:
        if min(self.unit, self.page, self.interval, self.sample) < 1 or min(self.sinks, self.recent) < 0:
            raise BudgetError(f"omnitide: unit, page, interval and sample are at least 1, sinks and recent not below 0: {self}")
        if not (0 < self.share <= 1 and 0 < self.decay <= 1 and 0 < self.follow <= 1) or min(self.word, self.sight) < 0:
            raise BudgetError(f"omnitide: share, decay and follow lie in (0, 1], weights are not below 0: {self}")

    @property
    def bounds(self) -> bool:
        """Always."""
        return True

    def store(self, layer: int, depth: int, amount: Amount) -> Arenas:
        """See `mmsdk.kv.policy.Storer`."""
        picking = Picking((self.word, self.sight), self.share, self.decay)
        pinned = self.sinks, self.recent
        return Arenas(Tide(picking, self.page, self.unit, *pinned, self.interval, self.sample, self.follow), amount, layer, depth)
