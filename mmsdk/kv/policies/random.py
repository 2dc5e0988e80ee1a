"""Any tokens and the newest: the control that a choice has to beat."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from mmsdk.kv.entries import Entries

__all__ = ["Random"]

# The finaliser of MurmurHash3, with numbers that int64 holds: equal positions of equal layers and heads get equal draws in any batch.
_FIRST, _SECOND, _STEP = 0x7F51_AFD7_ED55_8CCD, 0x44CE_B9FE_1A85_EC53, 0x1E37_79B9_7F4A_7C15


@dataclass(frozen=True, slots=True)
class Random:
    """Every position has a draw of its own in each layer and head, so that what is left later is a part of what was left before."""

    seed: int = 0
    interval: int = 1
    dense: int = 0

    @property
    def latents(self) -> bool:
        """Only positions count."""
        return True

    def scores(self, entries: Entries, keep: Int[Tensor, " b"]) -> Int[Tensor, "b g t"]:
        """The draws; the newest entry is above them."""
        heads = torch.arange(entries.keys.shape[1], device=entries.keys.device)[:, None]
        drawn = _mixed(_mixed(heads + entries.depth * self.seed * len(heads) + entries.layer * len(heads)) + entries.positions)
        newest = entries.order == entries.lengths[..., None] - 1
        return drawn.masked_fill(newest, torch.iinfo(torch.long).max)


def _mixed(x: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """A number that tells nothing of x, from 0 to 2^62."""
    for factor in (_FIRST, _SECOND):
        x = (x + _STEP) * factor
        x = x ^ ((x >> 33) & 0x7FFF_FFFF)
    return x & 0x3FFF_FFFF_FFFF_FFFF
