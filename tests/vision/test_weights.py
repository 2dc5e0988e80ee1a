"""Names of published weights: on disk as transformers writes them, whole models, and every way in which tensors do not fit."""

import json
from pathlib import Path

import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from safetensors.torch import load_file
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    PreTrainedModel,
    SiglipVisionModel,
)

from mmsdk.errors import ModelError
from mmsdk.vision.weights import vit_from_onnx, vit_from_transformers

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}


def tiny() -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    model = CLIPVisionModel(CLIPVisionConfig(**TINY, intermediate_size=64))
    return model.config.to_dict(), dict(model.state_dict())


@pytest.mark.parametrize("swiglu", [False, True])
def test_names_on_disk_and_in_memory_mean_the_same(tmp_path: Path, swiglu: bool) -> None:
    model = Dinov2Model(Dinov2Config(**TINY, use_swiglu_ffn=swiglu))
    model.save_pretrained(tmp_path)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    assert set(tensors) != set(model.state_dict())
    disk, memory = vit_from_transformers(config, tensors), vit_from_transformers(model.config.to_dict(), model.state_dict())
    assert disk.config == memory.config
    for (name, a), b in zip(disk.state_dict().items(), memory.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_sight_is_taken_out_of_a_whole_model() -> None:
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 10}
    whole = CLIPModel(CLIPConfig(text_config=text, vision_config={**TINY, "intermediate_size": 64}, projection_dim=8))
    vit = vit_from_transformers(whole.config.to_dict(), whole.state_dict())
    pixels = torch.randn(1, 3, 28, 28)
    with torch.inference_mode():
        assert (vit(pixels).cls[:, 0] - whole.vision_model(pixels).pooler_output).abs().max() < 1e-5


@pytest.mark.parametrize("cls", [Dinov2Model, CLIPVisionModel, SiglipVisionModel])
def test_what_a_configuration_leaves_out_has_the_published_default(cls: type[PreTrainedModel]) -> None:
    full = cls.config_class().to_dict()
    with torch.device("meta"):
        tensors = cls(cls.config_class()).state_dict()
    sparse = vit_from_transformers({"model_type": full["model_type"]}, tensors)
    assert sparse.config == vit_from_transformers(full, tensors).config


def test_everything_that_does_not_fit_is_listed() -> None:
    config, tensors = tiny()
    del tensors["encoder.layers.1.self_attn.k_proj.weight"], tensors["post_layernorm.bias"]
    tensors["encoder.layers.7.mlp.fc1.bias"] = torch.zeros(64)
    tensors["embeddings.class_embedding"] = torch.zeros(31)
    with pytest.raises(ModelError) as caught:
        vit_from_transformers(config, tensors, name="my/model")
    told = str(caught.value)
    assert "my/model" in told
    missing, unexpected, shape = told.split("; ")[1:]
    assert "encoder.layers.1.self_attn.k_proj.weight" in missing and "post_layernorm.bias" in missing
    assert "encoder.layers.7.mlp.fc1.bias" in unexpected
    assert "embeddings.class_embedding (has [31], expected [1, 32])" in shape


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        ("encoder.layers.0.mlp.fc1.weight", (32, 64), r"fc1\.weight \(has \[32, 64\], expected \[64, 32\]\)"),
        ("embeddings.position_embedding.weight", (32, 5), r"position_embedding\.weight \(has \[32, 5\], expected \[5, 32\]\)"),
        ("encoder.layers.1.self_attn.k_proj.weight", (32, 16), r"k_proj\.weight .*\(has \[32, 32\] \+ \[32, 16\] \+ \[32, 32\]"),
        ("encoder.layers.1.self_attn.q_proj.bias", (), r"q_proj\.bias .*\(has \[\] \+ \[32\] \+ \[32\], expected \[96\]\)"),
        ("post_layernorm.weight", (32, 1), r"post_layernorm\.weight \(has \[32, 1\], expected \[32\]\)"),
    ],
)
def test_as_many_numbers_in_another_shape_are_refused(name: str, shape: tuple[int, ...], told: str) -> None:
    config, tensors = tiny()
    assert name in tensors
    tensors[name] = torch.zeros(shape)
    with pytest.raises(ModelError, match=told):
        vit_from_transformers(config, tensors)


def test_stacked_parts_of_unequal_sizes_are_refused_though_their_sum_fits() -> None:
    config, tensors = tiny()
    for name, rows in (("q", 16), ("k", 48)):
        tensors[f"encoder.layers.0.self_attn.{name}_proj.weight"] = torch.zeros(rows, 32)
    with pytest.raises(ModelError, match=r"has \[16, 32\] \+ \[48, 32\] \+ \[32, 32\], expected \[96, 32\]"):
        vit_from_transformers(config, tensors)


def test_parts_that_take_no_part_are_known() -> None:
    config, tensors = tiny()
    without = vit_from_transformers(config, dict(tensors)).state_dict()
    tensors["embeddings.position_ids"] = torch.arange(5)
    found = vit_from_transformers(config, tensors).state_dict()
    assert found.keys() == without.keys() and all(torch.equal(found[name], without[name]) for name in found)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "swin"}, "'swin'"),
        ({"hidden_act": "relu"}, "'relu'"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"image_size": [28, 28]}, "image_size"),
    ],
)
def test_a_configuration_that_cannot_be_run_is_refused(change: dict[str, object], told: str) -> None:
    config, tensors = tiny()
    with pytest.raises(ModelError, match=told):
        vit_from_transformers({**config, **change}, tensors)


def test_a_file_that_is_no_onnx_model_is_refused(tmp_path: Path) -> None:
    junk = tmp_path / "junk.onnx"
    for content in (b"junk", b"\xff" * 100):
        junk.write_bytes(content)
        with pytest.raises(ModelError, match=r"junk\.onnx"):
            vit_from_onnx(junk)
    with pytest.raises(ModelError, match=r"none\.onnx"):
        vit_from_onnx(tmp_path / "none.onnx")


def test_another_onnx_model_is_refused(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(torch.ones(2, 2).numpy(), "w")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 2]) for name in "xy"]
    path = tmp_path / "other.onnx"
    onnx.save(helper.make_model(helper.make_graph([node], "other", ends[:1], ends[1:], [weight])), str(path))
    with pytest.raises(ModelError, match="holds no DINOv2 backbone"):
        vit_from_onnx(path)


def test_the_real_file_gives_dinov2_small(mini_encoder: Path) -> None:
    vit = vit_from_onnx(mini_encoder)
    assert sum(p.numel() for p in vit.parameters()) == 22_056_192
    assert (vit.config.layers, vit.config.width, vit.config.grid, vit.config.patch) == (12, 384, 37, 14)
    assert not any(p.requires_grad for p in vit.parameters())
