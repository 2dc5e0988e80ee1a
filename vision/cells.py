"""The cells of a grid of visual tokens, in the order in which tokens stand."""

import torch
from jaxtyping import Int
from torch import Tensor

__all__ = ["cells_of"]


def cells_of(grid: tuple[int, int, int], device: torch.device) -> Int[Tensor, "n 3"]:
    """Frame, row and column of each of the n = frames x rows x columns cells; columns vary before rows do, rows before frames."""
    axes = [torch.arange(size, device=device) for size in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)
