"""A drawn scene before the background of another picture, made of features alone.

Training has few photographs to draw scenes on. Without this, what lies behind tells the model what kind of picture it sees, and before a
photograph that it does not know it names things of another kind: a door and a handle, as on a robot's table.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mmsdk.apps.train_mini.features import Sample, Shard, cells_of
from mmsdk.vision.types import VisualTokens

__all__ = ["before", "on_a_photo"]

_SHARE = (0.4, 1.6)
"""How much of a background is the other picture's; more than 1 is 1, so that half of them are wholly replaced."""


def on_a_photo(sample: Sample) -> bool:
    """Whether it is a drawn scene with a background that nothing is asked about."""
    return sample.scene is not None and sample.scene.suite == "scene" and not sample.scene.background


def before(
    shard: Shard, i: int, tokens: VisualTokens, index: Int[Tensor, " k"], sample: Sample, rng: np.random.Generator
) -> Float[Tensor, "k d"]:
    """The features of `tokens`, cells `index` of the sample, with what is no thing blended into the background of picture i of the shard.

    They come back unchanged where that picture has no background. What lies above in one picture lies above in the other.
    """
    other = shard.tokens(i)
    free = _background(shard.samples[i], other.grid).nonzero().flatten()
    own = _background(sample, tokens.grid)[index]
    if not len(free):
        return tokens.features
    picked = other.features[free[np.sort(rng.integers(len(free), size=int(own.sum())))]]
    blended = tokens.features.clone()
    blended[own] = torch.lerp(tokens.features[own], picked, min(1.0, rng.uniform(*_SHARE)))
    return blended


def _background(sample: Sample, grid: Sequence[int]) -> Tensor:
    """True for every cell that lies a cell away from all things, as the encoder tells neighbours of each other: [cells]."""
    things = torch.zeros(1, 1, grid[1], grid[2])
    things.view(-1)[[index for index, _ in cells_of(sample, grid)]] = 1
    return nn.functional.max_pool2d(things, 3, stride=1, padding=1).view(-1) == 0
