"""Diffusers' own transformers, written by save_pretrained at tiny size and read by their files: the same velocities."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmsdk.diffusion.dit import Condition
from mmsdk.diffusion.models import load
from mmsdk.errors import ModelError, WeightsError

with warnings.catch_warnings():
    # what diffusers itself warns of while it is imported is not ours
    warnings.simplefilter("ignore")
    diffusers = pytest.importorskip("diffusers")
    CLASSES = {"wan": diffusers.WanTransformer3DModel, "ltx": diffusers.LTXVideoTransformer3DModel}

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
CONFIGS: dict[str, dict[str, Any]] = {
    "wan": {"num_attention_heads": 2, "attention_head_dim": 14, "in_channels": 3, "out_channels": 3, "text_dim": 16, "freq_dim": 32}
    | {"ffn_dim": 24, "num_layers": 2},
    "ltx": {"in_channels": 16, "out_channels": 16, "num_attention_heads": 2, "attention_head_dim": 8, "cross_attention_dim": 16}
    | {"num_layers": 2, "caption_channels": 12, "patch_size": 2},
}
FILE = "diffusion_pytorch_model.safetensors"


def written(family: str, folder: Path, **further: Any) -> Any:
    torch.manual_seed(0)
    model = CLASSES[family](**CONFIGS[family]).eval()
    for name, weight in model.named_parameters():
        # norms begin at 1 and biases near 0: with noise, what is left out or swapped shows
        weight.data += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(folder, **further)
    return model


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "12KB"}], ids=["one file", "shards"])
def test_wan_predicts_what_diffusers_predicts_also_with_a_time_for_each_token(tmp_path: Path, shards: dict[str, str]) -> None:
    theirs, ours = written("wan", tmp_path, **shards), load(tmp_path)
    latents, text = drawn(2, 3, 3, 6, 4), drawn(2, 5, 16)
    for time in (torch.tensor([900.0, 3.5]), torch.linspace(0, 999, 36).view(2, 18)):
        with torch.no_grad():
            expected = theirs(latents, time, text, return_dict=False)[0]
            torch.testing.assert_close(ours(latents, time, Condition(text)), expected, rtol=0, atol=1e-4)


def test_ltx_predicts_what_diffusers_predicts_for_padded_text(tmp_path: Path) -> None:
    theirs, ours = written("ltx", tmp_path), load(tmp_path)
    # what its pipeline packs by itself: patches of 1 x 2 x 2, channels before rows before columns
    latents, text, time = drawn(2, 4, 3, 6, 8), drawn(2, 6, 12), torch.tensor([700.0, 20.0])
    packed = latents.view(2, 4, 3, 3, 2, 4, 2).permute(0, 2, 3, 5, 1, 4, 6).reshape(2, 36, 16)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    sides = {"num_frames": 3, "height": 3, "width": 4, "rope_interpolation_scale": (8 / 25, 32, 32)}
    with torch.no_grad():
        expected = theirs(packed, text, time, mask.float(), **sides, return_dict=False)[0]
        expected = expected.view(2, 3, 3, 4, 4, 2, 2).permute(0, 4, 1, 2, 5, 3, 6).reshape(latents.shape)
        torch.testing.assert_close(ours(latents, time, Condition(text, mask)), expected, rtol=0, atol=1e-4)
        whole = ours(latents, time, Condition(text, torch.ones(2, 6, dtype=torch.bool)))
        # KA-05: a mask that hides nothing is none
        torch.testing.assert_close(ours(latents, time, Condition(text)), whole, rtol=0, atol=1e-6)


def test_tensors_that_are_missing_unexpected_or_misshaped_are_all_named(tmp_path: Path) -> None:
    written("wan", tmp_path)
    tensors = load_file(tmp_path / FILE)
    tensors["stray.weight"] = tensors.pop("blocks.1.attn1.to_q.weight")
    tensors["proj_out.bias"] = torch.zeros(7)
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ModelError) as error:
        load(tmp_path)
    for told in ("missing: blocks.1.attn1.to_q.weight", "unexpected: stray.weight", "misshaped: proj_out.bias (7,), not (12,)"):
        assert told in str(error.value)


def test_a_pickle_is_refused_and_a_pipeline_is_entered(tmp_path: Path) -> None:
    written("wan", tmp_path / "transformer")
    (tmp_path / "model_index.json").write_text("{}")
    assert load(tmp_path).config.heads == 2
    (tmp_path / "transformer" / FILE).rename(tmp_path / "transformer" / "diffusion_pytorch_model.bin")
    with pytest.raises(WeightsError, match="is a pickle"):
        load(tmp_path)


def test_another_family_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "MochiTransformer3DModel"}')
    with pytest.raises(ModelError, match="MochiTransformer3DModel; known are WanTransformer3DModel"):
        load(tmp_path)
