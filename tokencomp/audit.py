"""Reading an audit: which source tokens survived, into what, and how a chain of methods adds up."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mmsdk.tokencomp.types import Audit

__all__ = ["compose", "dropped", "owners"]


def dropped(audit: Audit) -> Bool[Tensor, " n"]:
    """True for every source token that no surviving token stands for."""
    return audit.assignment < 0


def compose(first: Audit, second: Audit) -> Audit:
    """The audit of running `second` on the survivors of `first`, told in the source tokens of `first`.

    The scores are those of `first` (they exist for every source token); names join with "+", times add up. Where one of them is
    "identity", the result is the other.
    """
    if second.method == "identity":
        return first
    if first.method == "identity":
        return second
    # one more entry at the end, so that index -1 (dropped before) leads to -1 (dropped)
    onward = torch.cat([second.assignment, second.assignment.new_full((1,), -1)])
    return Audit(f"{first.method}+{second.method}", onward[first.assignment], first.scores, first.seconds + second.seconds)


def owners(audit: Audit, positions: Int[Tensor, "n 3"], grid: tuple[int, int, int]) -> Int[Tensor, "t h w"]:
    """The surviving token that each cell of the grid went to, -1 where the cell was dropped or held no token.

    `positions` are those of the source tokens. This is what the explaining picture draws.
    """
    cells = audit.assignment.new_full(grid, -1)
    cells[tuple(positions.unbind(dim=1))] = audit.assignment
    return cells
