"""The low-rank update of mini: read from a real file, merged into real modules, damaged files refused."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from mmsdk.errors import ModelError
from mmsdk.models.mini.adapter import merge, read_adapter


def layers_of(count: int) -> nn.ModuleList:
    torch.manual_seed(0)
    shapes = {"qkv": (8, 12), "o": (8, 8), "gate_up": (8, 20), "down": (10, 8)}
    return nn.ModuleList(nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()}) for _ in range(count))


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    safetensors.torch.save_file(tensors, path)
    return path


def test_updates_are_added_to_the_matrix_they_name(tmp_path: Path) -> None:
    a, b = torch.randn(3, 8), torch.randn(12, 3)
    path = write(tmp_path / "adapter.safetensors", {"lora.1.qkv.a": a, "lora.1.qkv.b": b, "projector.up.weight": torch.ones(2, 2)})
    layers = layers_of(2)
    before = {name: parameter.detach().clone() for name, parameter in layers.named_parameters()}
    adapter = read_adapter(path)
    merge(layers, adapter)
    assert list(adapter.projector) == ["up.weight"]
    for name, parameter in layers.named_parameters():
        expected = before[name] + (b @ a if name == "1.qkv.weight" else 0.0)
        torch.testing.assert_close(parameter.detach(), expected)


@pytest.mark.parametrize(
    ("tensors", "hint"),
    [
        ({"lora.0.qkv.a": torch.ones(3, 8)}, "needs a"),
        ({"lora.0.qkv.a": torch.ones(3, 8), "lora.0.qkv.b": torch.ones(12, 2)}, "needs a"),
        ({"lora.0.k.a": torch.ones(3, 8)}, "neither"),
        ({"lora.0.qkv.a": torch.ones(3), "lora.0.qkv.b": torch.ones(12, 3)}, r"lora\.0\.qkv needs a"),
        ({"lora.0.qkv.a": torch.ones(3, 8), "lora.0.qkv.b": torch.ones(3)}, r"lora\.0\.qkv needs a"),
        ({"lora.0.qkv.a": torch.ones(3, 8), "lora.0.qkv.b": torch.ones(1, 12, 3)}, r"lora\.0\.qkv needs a"),
        ({"lora.0.qkv.a": torch.tensor(1.0), "lora.0.qkv.b": torch.tensor(1.0)}, r"lora\.0\.qkv needs a"),
    ],
)
def test_damaged_adapters_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor], hint: str) -> None:
    with pytest.raises(ModelError, match=hint):
        read_adapter(write(tmp_path / "adapter.safetensors", tensors))


@pytest.mark.parametrize(("layer", "shape"), [(5, (12, 3)), (0, (11, 3))])
def test_adapters_of_another_model_are_refused(tmp_path: Path, layer: int, shape: tuple[int, int]) -> None:
    tensors = {f"lora.{layer}.qkv.a": torch.ones(3, 8), f"lora.{layer}.qkv.b": torch.ones(shape)}
    with pytest.raises(ModelError, match=rf"adapter\.safetensors: lora\.{layer}\.qkv changes"):
        merge(layers_of(2), read_adapter(write(tmp_path / "adapter.safetensors", tensors)))


def test_an_update_too_large_to_be_multiplied_is_refused_by_its_shape(tmp_path: Path) -> None:
    tensors = {"lora.0.qkv.a": torch.ones(1, 2_000_000), "lora.0.qkv.b": torch.ones(2_000_000, 1)}
    with pytest.raises(ModelError, match=r"a matrix of \(2000000, 2000000\)"):
        merge(layers_of(1), read_adapter(write(tmp_path / "adapter.safetensors", tensors)))


def test_a_file_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter.safetensors").write_bytes(b"not an adapter")
    with pytest.raises(ModelError, match="cannot be read"):
        read_adapter(tmp_path / "adapter.safetensors")
    with pytest.raises(ModelError, match="cannot be read"):
        read_adapter(tmp_path / "missing.safetensors")
