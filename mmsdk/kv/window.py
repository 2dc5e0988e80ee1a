"""The last n tokens of every row.

Each is in the slot of its position modulo n, so that a new token takes the place of the one that falls out.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kv.open_windows import Tokens
from mmsdk.kv.types import LayerView

__all__ = ["Window"]


class Window:
    """Of n + 1 slots the last one takes what is not kept: padding, and tokens of a long pass that have fallen out already."""

    def __init__(self, slots: Float[Tensor, "b slots d"]) -> None:
        self._slots = slots
        self._size = slots.shape[1] - 1

    @classmethod
    def empty(cls, size: int, width: int, rows: int, dtype: torch.dtype, device: torch.device) -> "Window":
        """No token; zeros, since what is masked must be finite all the same."""
        return cls(torch.zeros(rows, size + 1, width, dtype=dtype, device=device))

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return self._slots.nbytes

    def select(self, rows: Int[Tensor, " r"]) -> "Window":
        """A copy of these rows."""
        return Window(self._slots[rows])

    @staticmethod
    def joined(parts: Sequence["Window"]) -> "Window":
        """The rows of several of one size: a copy."""
        return Window(torch.cat([part._slots for part in parts]))

    def emptied(self) -> "Window":
        """As it was before the first token."""
        return Window(torch.zeros_like(self._slots))

    def append(self, tokens: Tokens, new: Float[Tensor, "b s d"]) -> LayerView:
        """Store the new tokens; the view is what was there before them in order of positions, and they themselves."""
        held = self.view(Tokens(tokens.positions[:, :0], tokens.before, tokens.before))
        keys, positions = torch.cat((held.keys[:, 0], new), dim=1), torch.cat((held.positions, tokens.positions), dim=1)
        after = torch.tensor(tokens.after, device=new.device)[:, None]
        stays = tokens.positions >= (after - self._size).clamp_min(0)
        slots = torch.where(stays, tokens.positions % self._size, self._size)
        self._slots[torch.arange(len(new), device=new.device)[:, None], slots] = new
        return _view(keys, positions, tokens.in_step)

    def view(self, tokens: Tokens) -> LayerView:
        """The tokens of the window in order of their positions, the shorter rows padded in front."""
        count = min(self._size, max(tokens.after))
        after = torch.tensor(tokens.after, device=self._slots.device)[:, None]
        positions = after - count + torch.arange(count, device=self._slots.device)
        keys = self._slots[torch.arange(len(self._slots), device=self._slots.device)[:, None], positions % self._size]
        return _view(keys, positions.clamp_min(-1), len(set(tokens.after)) == 1)


def _view(keys: Float[Tensor, "b t d"], positions: Int[Tensor, "b t"], ordered: bool) -> LayerView:
    valid = positions >= 0
    return LayerView(keys[:, None], keys[:, None], positions, valid, valid.sum(1), ordered)
