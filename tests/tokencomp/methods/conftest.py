"""Tokens to compress: random, or with what a test wants to see in them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mmsdk.vision.types import VisualTokens


@pytest.fixture(scope="session")
def tokens_of() -> Callable[..., VisualTokens]:
    """tokens_of((t, h, w), seed, width=12, features=None, kept=None): a full grid, or the tokens `kept` of it."""
    return _tokens


def _tokens(
    grid: tuple[int, int, int], seed: int = 0, width: int = 12, features: Tensor | None = None, kept: Tensor | None = None
) -> VisualTokens:
    frames, rows, columns = grid
    n = frames * rows * columns
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(n, width, generator=generator)
    index = torch.arange(n) if kept is None else kept
    return VisualTokens(
        features=(drawn if features is None else features)[index],
        positions=torch.cartesian_prod(torch.arange(frames), torch.arange(rows), torch.arange(columns)).reshape(n, 3)[index],
        weight=torch.randint(1, 5, (n,), generator=generator).float()[index],
        grid=grid,
        times=torch.arange(frames) * 0.5,
        saliency=torch.rand(n, generator=generator)[index],
        keys=torch.randn(n, 6, generator=generator)[index],
    )
