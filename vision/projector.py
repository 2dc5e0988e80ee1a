"""What joins a vision tower to a language model in published checkpoints: a few matrices from the features of a token to its embedding.

Module and tensor names are the checkpoints' own, so that a projector is filled by name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.errors import ModelError
from mmsdk.vision.types import VisualTokens

__all__ = ["Projected", "TwoLayers", "Unchanged", "activation"]

_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
        "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "relu": F.relu,
        "silu": F.silu,
    }
)


def activation(name: str, where: str) -> Callable[[Tensor], Tensor]:
    """A function by the name that settings give it. Raises ModelError for one that is not known."""
    if name not in _FUNCTIONS:
        raise ModelError(f"{where}: the activation {name!r} is not supported; known: {', '.join(_FUNCTIONS)}")
    return _FUNCTIONS[name]


class TwoLayers(nn.Module):
    """linear_2(act(linear_1(x))), behind a layer norm where `norm` says so."""

    def __init__(self, vision: int, language: int, act: Callable[[Tensor], Tensor], bias: bool = True, norm: bool = False) -> None:
        super().__init__()
        self.layer_norm: nn.Module = nn.LayerNorm(vision) if norm else nn.Identity()
        self.linear_1 = nn.Linear(vision, language, bias=bias)
        self.act = act
        self.linear_2 = nn.Linear(language, language, bias=bias)

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n e"]:
        """Width d in, width e out."""
        embeddings: Tensor = self.linear_2(self.act(self.linear_1(self.layer_norm(x))))
        return embeddings


@dataclass(frozen=True, slots=True)
class Projected:
    """A projector over the tokens of several inputs: one pass over all of them together, in the dtype of its weights."""

    projector: nn.Module

    def __call__(self, tokens: Sequence[VisualTokens]) -> list[Float[Tensor, "_ e"]]:
        """The embeddings of each input, in order."""
        if not tokens:
            return []
        features = torch.cat([one.features for one in tokens])
        like = next(self.projector.parameters())
        embeddings: Tensor = self.projector(features.to(like.dtype))
        return list(embeddings.split([len(one) for one in tokens]))


@dataclass(frozen=True, slots=True)
class Unchanged:
    """What is left to do where an encoder gives embeddings already: nothing."""

    def __call__(self, tokens: Sequence[VisualTokens]) -> list[Float[Tensor, "_ e"]]:
        """The features of each input."""
        return [one.features for one in tokens]
