"""The vision transformer against transformers' classes and the ONNX run: same weights, same pixels, same numbers."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import PIL.Image
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel, Dinov2Config, Dinov2Model, SiglipVisionConfig, SiglipVisionModel

from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.taps import Taps
from mmsdk.vision.types import Image
from mmsdk.vision.vit import ViT
from mmsdk.vision.weights import vit_from_onnx, vit_from_transformers

CLOSE = 1e-4
PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")


@pytest.fixture(scope="module")
def ours(mini_encoder: Path) -> ViT:
    return vit_from_onnx(mini_encoder)


@pytest.fixture(scope="module")
def reference(mini_encoder: Path) -> Dinov2Model:
    """transformers' class with the same weights, put in their places by the order of the export's numbers instead of its node names."""
    with torch.device("meta"):
        model = Dinov2Model(Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=518, attn_implementation="eager"))
    numbered, state = [], {"embeddings.mask_token": torch.zeros(1, 384)}
    for item in onnx.load(str(mini_encoder)).graph.initializer:
        value = torch.from_numpy(numpy_helper.to_array(item).copy())
        if item.name.startswith("backbone."):
            state[_live_name(item.name.removeprefix("backbone."))] = value
        elif item.name.startswith("onnx::"):
            numbered.append((int(item.name.rpartition("_")[2]), value))
    (_, first), (_, plane), *matrices = sorted(numbered, key=lambda pair: pair[0])
    state["embeddings.position_embeddings"] = torch.cat((first, plane), dim=1)
    kinds = ("attention.k_proj", "attention.v_proj", "attention.q_proj", "attention.o_proj", "mlp.fc1", "mlp.fc2")
    for i, (_, value) in enumerate(matrices):
        state[f"encoder.layer.{i // 6}.{kinds[i % 6]}.weight"] = value.T
    model.load_state_dict(state, assign=True)
    return model.eval()


def _live_name(name: str) -> str:
    for old, new in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        name = name.replace(f"attention.attention.{old}", f"attention.{new}")
    return name.replace("attention.output.dense", "attention.o_proj")


def photo(folder: Path, name: str, height: int, width: int) -> Tensor:
    found = next(folder.rglob(name))
    picture = PIL.Image.open(found).convert("RGB").resize((width, height), PIL.Image.Resampling.BICUBIC)
    return Preprocess(area=height // 14 * (width // 14))(torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None])


@torch.inference_mode()
def test_photos_agree_with_transformers(ours: ViT, reference: Dinov2Model, photos: Path) -> None:
    pixels = torch.cat([photo(photos, name, 224, 224) for name in PHOTOS])
    out, expected = ours(pixels, Taps(hidden=(5,))), reference(pixels, output_hidden_states=True)
    assert (out.tokens - expected.last_hidden_state[:, 1:]).abs().max() < CLOSE
    assert (out.cls[:, 0] - expected.pooler_output).abs().max() < CLOSE
    assert (out.taps.hidden[5] - expected.hidden_states[6]).abs().max() < CLOSE


@pytest.mark.parametrize(("height", "width"), [(14, 14), (126, 280), (14, 420), (518, 252), (518, 518)])
@torch.inference_mode()
def test_positions_agree_at_other_sizes(ours: ViT, reference: Dinov2Model, height: int, width: int) -> None:
    """Every grid: smaller, oblong, a strip, one side learned, the learned one itself."""
    n = height // 14 * (width // 14)
    expected = reference.embeddings.interpolate_pos_encoding(torch.empty(1, n + 1, 384), height, width)
    assert (ours.positions(height // 14, width // 14) - expected[0]).abs().max() < 1e-6


@torch.inference_mode()
def test_an_oblong_photo_agrees_with_transformers(ours: ViT, reference: Dinov2Model, photos: Path) -> None:
    pixels = photo(photos, "coffee.png", 126, 280)
    assert (ours(pixels).tokens - reference(pixels).last_hidden_state[:, 1:]).abs().max() < CLOSE


@torch.inference_mode()
def test_photos_agree_with_the_onnx_run(ours: ViT, mini_encoder: Path, photos: Path) -> None:
    model = onnx.load(str(mini_encoder))
    (last,) = (n.output[0] for n in model.graph.node if n.name == "/backbone/layernorm/Add_1")
    model.graph.output.append(onnx.helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, None))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    pixels = torch.cat([photo(photos, name, 224, 224) for name in PHOTOS[:2]])
    (expected,) = session.run([last], {"input_image": pixels.numpy()})
    out = ours(pixels)
    assert (torch.cat((out.cls, out.tokens), dim=1) - torch.from_numpy(expected)).abs().max() < CLOSE


@torch.inference_mode()
def test_attention_rows_agree_with_eager_attention_on_a_photo(ours: ViT, reference: Dinov2Model, photos: Path) -> None:
    """PP-01: the model runs fused, and the scores are those of an eager run."""
    pixels = photo(photos, "chelsea.png", 168, 252)
    out = ours(pixels, Taps(first_rows=(0, -1), mean_rows=(3, -1)))
    eager = reference(pixels, output_attentions=True).attentions
    for layer in (0, -1):
        assert (out.taps.first_rows[layer] - eager[layer][:, :, 0]).abs().max() < CLOSE
    for layer in (3, -1):
        assert (out.taps.mean_rows[layer] - eager[layer].mean(dim=2)).abs().max() < CLOSE


def test_saliency_is_the_class_tokens_attention(ours: ViT, reference: Dinov2Model, photos: Path) -> None:
    """PP-01, from the encoder down: never none, never all zeros."""
    found = next(photos.rglob("rocket.jpg"))
    image = Image(torch.from_numpy(np.array(PIL.Image.open(found).convert("RGB"))).permute(2, 0, 1))
    encoder = Encoder(Dinov2(ours), Preprocess())
    (tokens,) = encoder([image])
    with torch.inference_mode():
        eager = reference(encoder.preprocess(image.pixels[None]), output_attentions=True).attentions[-1]
    assert (tokens.saliency - eager[0, :, 0, 1:].mean(dim=0)).abs().max() < CLOSE and tokens.saliency.min() > 0


TINY = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 56, "patch_size": 14}


def dinov2(**more: object) -> Dinov2Model:
    return Dinov2Model(Dinov2Config(**TINY, attn_implementation="eager", **more))


def clip(**more: object) -> CLIPVisionModel:
    return CLIPVisionModel(CLIPVisionConfig(**TINY, intermediate_size=96, attn_implementation="eager", **more))


def siglip(**more: object) -> SiglipVisionModel:
    return SiglipVisionModel(SiglipVisionConfig(**TINY, intermediate_size=96, attn_implementation="eager", **more))


def shaken(model: nn.Module) -> nn.Module:
    """Random in every parameter: fresh models have biases of 0 and scales of 1, which would hide a mistake in their places."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1 + parameter.data
    return model.eval()


def live(model: nn.Module) -> tuple[Mapping[str, object], Mapping[str, Tensor]]:
    return model.config.to_dict(), model.state_dict()


FAMILIES = {
    "dinov2": dinov2,
    "dinov2-swiglu": lambda: dinov2(use_swiglu_ffn=True),
    "clip": clip,
    "clip-gelu": lambda: clip(hidden_act="gelu"),
    "siglip": siglip,
}


@pytest.mark.parametrize("size", [(56, 56), (28, 70), (14, 14)])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_every_family_agrees_with_its_class(family: str, size: tuple[int, int]) -> None:
    model = shaken(FAMILIES[family]())
    ours = vit_from_transformers(*live(model))
    pixels = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    more = {} if family.startswith("dinov2") else {"interpolate_pos_encoding": True}
    expected = model(pixels, output_hidden_states=True, output_attentions=True, **more)
    out = ours(pixels, Taps(hidden=(0, -1), norms=(1,), first_rows=(-1,), mean_rows=(0,)))
    assert (out.taps.hidden[0] - expected.hidden_states[1]).abs().max() < CLOSE
    assert (out.taps.norms[1] - expected.hidden_states[2].norm(dim=-1)).abs().max() < CLOSE
    assert (out.taps.first_rows[-1] - expected.attentions[-1][:, :, 0]).abs().max() < CLOSE
    assert (out.taps.mean_rows[0] - expected.attentions[0].mean(dim=2)).abs().max() < CLOSE
    if family.startswith("clip"):
        # CLIP's class applies its last norm to the class token alone.
        assert (out.taps.hidden[-1] - expected.last_hidden_state).abs().max() < CLOSE
        assert (out.cls[:, 0] - expected.pooler_output).abs().max() < CLOSE
    else:
        assert (torch.cat((out.cls, out.tokens), dim=1) - expected.last_hidden_state).abs().max() < CLOSE


@torch.inference_mode()
def test_keys_agree_with_the_class() -> None:
    model = shaken(siglip())
    kept: list[Tensor] = []
    model.get_submodule("encoder.layers.1.self_attn.k_proj").register_forward_hook(lambda module, args, out: kept.append(out))
    pixels = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(2))
    model(pixels)
    keys = vit_from_transformers(*live(model))(pixels, Taps(keys=(1,))).taps.keys[1]
    assert (keys.transpose(1, 2).flatten(2) - kept[0]).abs().max() < CLOSE
