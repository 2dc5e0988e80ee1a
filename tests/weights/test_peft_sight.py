"""What sees, on updated weights, where somebody else's encoder is part of it. Our own ones are held to PEFT in tests/test_adapters.py."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmsdk.errors import ModelError
from mmsdk.vision.encode import Encoder, Sight
from mmsdk.vision.encoders.states import States
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.projector import Projected, TwoLayers
from mmsdk.vision.prune import Pruning
from mmsdk.vision.shorten import WHOLE, Shortening
from mmsdk.vision.types import Media, VisualTokens
from mmsdk.vision.vit import ViT, ViTConfig
from mmsdk.weights.peft_sight import rebuilt, sees


@dataclass(frozen=True, slots=True)
class Foreign:
    """An encoder that nothing is known of."""

    width: int = 4

    def count(self, size: tuple[int, int], frames: int = 1) -> int:
        return frames

    def __call__(self, media: Sequence[Media]) -> list[VisualTokens]:
        grids = [torch.zeros(1, 3, dtype=torch.int64)] * len(media)
        return [VisualTokens(torch.ones(1, 4), grid, torch.ones(1), (1, 1, 1), torch.zeros(1), torch.ones(1)) for grid in grids]


class Around:
    """A backbone around one of ours, with no place for another transformer."""

    def __init__(self, inner: States) -> None:
        self.vit, self.width, self._inner = inner.vit, inner.width, inner

    def __call__(self, pixels: Tensor, shortening: Shortening | Pruning = WHOLE) -> Sight:
        return self._inner(pixels, shortening)


def test_a_projector_is_changed_whatever_sees_in_front_of_it() -> None:
    encoder, before, after = Foreign(), Projected(TwoLayers(4, 6, F.gelu)), TwoLayers(4, 6, F.gelu)
    assert list(sees(encoder, before)) == ["projector"]
    same, connector = rebuilt(encoder, before, {"projector": after})
    assert same is encoder and isinstance(connector, Projected) and connector.projector is after


def test_a_backbone_that_has_no_place_for_another_transformer_is_told() -> None:
    vit = ViT(ViTConfig(width=8, layers=1, heads=1, hidden=8, grid=2))
    encoder, connector = Encoder(Around(States(vit)), Preprocess()), Projected(TwoLayers(8, 6, F.gelu))
    parts = dict(sees(encoder, connector).items())
    with pytest.raises(ModelError, match="a vision tower within Around"):
        rebuilt(encoder, connector, parts)
