"""The projector of `mini`: DINOv2 patch features and their place in the picture, to embeddings of the language model.

Ours, trained in the repository. A patch's place and time enter as numbers, not through the order of the sequence, so that tokens may be
dropped, merged or reordered by a compressor and still say where and when they were.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mmsdk.vision.types import VisualTokens

__all__ = ["Projector", "ProjectorConfig", "place_features"]

_FREQUENCIES = 4


@dataclass(frozen=True, slots=True)
class ProjectorConfig:
    """Widths of the visual features, of the hidden layer and of the language model's embeddings."""

    vision: int = 384
    hidden: int = 1024
    language: int = 576


def place_features(tokens: VisualTokens) -> Float[Tensor, "n 28"]:
    """Where and when each token is: (t, y, x) of its cell's centre in [0, 1], their sines and cosines, and whether it is from a clip."""
    grid = torch.tensor(tokens.grid, device=tokens.positions.device, dtype=torch.float32)
    at = (tokens.positions.float() + 0.5) / grid
    octaves = math.pi * 2.0 ** torch.arange(_FREQUENCIES, device=at.device)
    waves = (at[:, :, None] * octaves).flatten(1)
    moving = torch.full_like(at[:, :1], float(tokens.grid[0] > 1))
    return torch.cat((at, waves.sin(), waves.cos(), moving), dim=1)


class Projector(nn.Module):
    """A two-layer MLP over normalised features and places."""

    places = 3 + 3 * 2 * _FREQUENCIES + 1

    def __init__(self, config: ProjectorConfig = ProjectorConfig()) -> None:
        super().__init__()
        self.config = config
        self.norm = nn.LayerNorm(config.vision, elementwise_affine=False)
        self.up = nn.Linear(config.vision + self.places, config.hidden)
        self.down = nn.Linear(config.hidden, config.language)

    def forward(self, features: Float[Tensor, "*b n d"], places: Float[Tensor, "*b n p"]) -> Float[Tensor, "*b n e"]:
        """Features and `place_features` of any number of tokens to embeddings."""
        x = torch.cat((self.norm(features), places.to(features.dtype)), dim=-1)
        embeddings: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return embeddings

    def connect(self, tokens: Sequence[VisualTokens]) -> list[Float[Tensor, "n e"]]:
        """Embeddings of each visual input, in order; one pass over all of them together."""
        if not tokens:
            return []
        dtype = self.up.weight.dtype
        features = torch.cat([t.features for t in tokens]).to(dtype)
        places = torch.cat([place_features(t) for t in tokens])
        return list(self(features, places).split([len(t) for t in tokens]))
