"""What of mini is put together from a file: its projector fits the encoder before it and the decoder behind it, or is refused by name."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmsdk.errors import ModelError
from mmsdk.models.mini.adapter import Adapter
from mmsdk.models.mini.family import _backbone, _projector
from mmsdk.models.mini.projector import Projector, ProjectorConfig
from mmsdk.vision.vit import ViT, ViTConfig

VISION, HIDDEN, LANGUAGE = 10, 7, 12


def adapter(middle: tuple[int, ...] = (), **change: Tensor | None) -> Adapter:
    """The projector of a training run as read from a file, some of its tensors changed or taken out ("up.weight" is `up_weight`)."""
    torch.manual_seed(0)
    state: dict[str, Tensor | None] = dict(Projector(ProjectorConfig(VISION, HIDDEN, LANGUAGE)).state_dict())
    state |= {name.replace("_", "."): tensor for name, tensor in change.items()}
    return Adapter(Path("some_adapter.safetensors"), {name: t.half() for name, t in state.items() if t is not None}, {}, middle)


def test_the_projector_is_the_file_s() -> None:
    found, expected = _projector(adapter(), VISION, LANGUAGE), adapter().projector
    assert found.config == ProjectorConfig(VISION, HIDDEN, LANGUAGE)
    assert not any(p.requires_grad for p in found.parameters())
    for name, tensor in found.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected[name].float())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"up_weight": torch.ones(HIDDEN)}, r"projector\.up\.weight is \(7,\), it must be \(7, 38\)"),
        ({"up_weight": torch.tensor(1.0)}, r"projector\.up\.weight is \(\)"),
        ({"up_weight": torch.ones(HIDDEN, 20)}, r"projector\.up\.weight is \(7, 20\)"),
        ({"up_bias": torch.ones(HIDDEN, 1)}, r"projector\.up\.bias is \(7, 1\)"),
        ({"up_bias": torch.ones(0)}, r"projector\.\w+\.\w+ is .*, it must be"),
        ({"up_bias": None}, r"projector\.up\.bias is missing"),
        ({"down_weight": torch.ones(LANGUAGE - 1, HIDDEN)}, r"projector\.down\.weight is \(11, 7\).*embeddings 12 wide"),
        ({"down_bias": torch.tensor(1.0)}, r"projector\.down\.bias is \(\)"),
        ({"side_weight": torch.ones(1)}, r"projector\.side\.weight is no tensor"),
    ],
)
def test_a_projector_that_does_not_fit_is_refused_by_tensor(change: dict[str, Tensor | None], told: str) -> None:
    with pytest.raises(ModelError, match=r"some_adapter\.safetensors: " + told):
        _projector(adapter(**change), VISION, LANGUAGE)


@pytest.mark.parametrize(("vision", "language"), [(VISION + 1, LANGUAGE), (VISION, LANGUAGE + 1)])
def test_a_projector_of_another_encoder_or_decoder_is_refused(vision: int, language: int) -> None:
    with pytest.raises(ModelError, match=f"features {vision} wide to embeddings {language} wide"):
        _projector(adapter(), vision, language)


@pytest.mark.parametrize("layer", [-1, 2, 40])
def test_a_layer_that_the_encoder_lacks_is_refused(layer: int) -> None:
    vit = ViT(ViTConfig(width=64, layers=2, heads=1, hidden=8, grid=2))
    assert _backbone(vit, adapter((0, 1))).width == 3 * 64
    with pytest.raises(ModelError, match=f"some_adapter.safetensors: .* layer {layer} of the encoder, which has 2"):
        _backbone(vit, adapter((1, layer)))
