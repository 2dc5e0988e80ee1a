"""Diffusers' own transformers, written by save_pretrained at tiny size and read by their files: the same velocities."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmsdk.diffusion.generate import generate
from mmsdk.diffusion.models import load
from mmsdk.diffusion.preserving import Preserving
from mmsdk.diffusion.schedule import flow
from mmsdk.diffusion.types import Condition
from mmsdk.errors import InputError, ModelError, WeightsError

with warnings.catch_warnings():
    # what diffusers itself warns of while it is imported is not ours
    warnings.simplefilter("ignore")
    diffusers = pytest.importorskip("diffusers")
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    CLASSES = {
        "wan": diffusers.WanTransformer3DModel,
        "ltx": diffusers.LTXVideoTransformer3DModel,
        "hunyuan": diffusers.HunyuanVideoTransformer3DModel,
        "cogvideox": diffusers.CogVideoXTransformer3DModel,
    }

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
CONFIGS: dict[str, dict[str, Any]] = {
    "wan": {"num_attention_heads": 2, "attention_head_dim": 14, "in_channels": 3, "out_channels": 3, "text_dim": 16, "freq_dim": 32}
    | {"ffn_dim": 24, "num_layers": 2},
    "ltx": {"in_channels": 16, "out_channels": 16, "num_attention_heads": 2, "attention_head_dim": 8, "cross_attention_dim": 16}
    | {"num_layers": 2, "caption_channels": 12, "patch_size": 2},
    "hunyuan": {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10, "num_layers": 2}
    | {"num_single_layers": 2, "num_refiner_layers": 1, "patch_size": 2, "text_embed_dim": 16, "pooled_projection_dim": 8}
    | {"rope_axes_dim": [2, 4, 4], "mlp_ratio": 2.0},
    "cogvideox": {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "time_embed_dim": 12}
    | {"text_embed_dim": 10, "num_layers": 2, "sample_width": 6, "sample_height": 4, "sample_frames": 9, "max_text_seq_length": 5},
}
FILE = "diffusion_pytorch_model.safetensors"


def written(family: str, folder: Path, settings: dict[str, Any] | None = None, **further: Any) -> Any:
    torch.manual_seed(0)
    model = CLASSES[family](**CONFIGS[family] | (settings or {})).eval()
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


@pytest.mark.parametrize("told", [True, False], ids=["2.1", "2.2"])
def test_wan_begins_with_a_picture_as_diffusers_does(tmp_path: Path, told: bool) -> None:
    """Its latents stand beside the noisy ones; 2.1 is told, too, what an encoder saw. Diffusers takes 512 tokens of text."""
    pictures = {"image_dim": 10, "added_kv_proj_dim": 28} if told else {}
    theirs, ours = written("wan", tmp_path, {"in_channels": 7} | pictures), load(tmp_path)
    latents, beside, text, time = drawn(2, 3, 3, 6, 4), drawn(2, 4, 3, 6, 4), drawn(2, 512, 16), torch.tensor([900.0, 3.5])
    seen = drawn(2, 5, 10) if told else None
    condition = Condition(text, beside=beside, seen=seen)
    with torch.no_grad():
        expected = theirs(torch.cat((latents, beside), 1), time, text, seen, return_dict=False)[0]
        torch.testing.assert_close(ours(latents, time, condition), expected, rtol=0, atol=1e-4)
    assert generate(ours, latents, condition, flow(2)).latents.shape == latents.shape
    with pytest.raises(InputError, match="7 channels"):
        ours(latents, time, Condition(text, seen=seen))
    with pytest.raises(InputError, match="encoder saw" if told else "no picture"):
        ours(latents, time, Condition(text, beside=beside, seen=None if told else drawn(2, 1, 10)))


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


@pytest.mark.parametrize("guided", [True, False])
def test_hunyuan_video_predicts_what_diffusers_predicts_with_padded_text(tmp_path: Path, guided: bool) -> None:
    """KA-05: padding is read by nobody; more of it changes nothing, and rows of several lengths are refused rather than mixed."""
    theirs, ours = written("hunyuan", tmp_path, {"guidance_embeds": guided}), load(tmp_path)
    latents, text, pooled, time = drawn(2, 4, 3, 4, 6), drawn(2, 6, 16), drawn(2, 8), torch.tensor([700.0, 20.0])
    mask = (torch.arange(6) < 4).expand(2, -1)
    guidance = torch.full((2,), 4500.0) if guided else None
    with torch.no_grad():
        expected = theirs(latents, time, text, mask.float(), pooled, guidance, return_dict=False)[0]
        got = ours(latents, time, Condition(text, mask, pooled, 4.5))
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(ours(latents, time, Condition(text[:, :4], pooled=pooled, guidance=4.5)), got, rtol=0, atol=1e-6)
        with pytest.raises(InputError, match="one by one"):
            ours(latents, time, Condition(text, torch.arange(6) < torch.tensor([[4], [5]]), pooled))
        with pytest.raises(InputError, match="one vector"):
            ours(latents, time, Condition(text))


KINDS = {
    "2B": {},
    "5B": {"use_rotary_positional_embeddings": True},
    "1.5": {"use_rotary_positional_embeddings": True, "patch_size_t": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_cogvideox_predicts_what_diffusers_predicts_as_a_flow(tmp_path: Path, kind: str) -> None:
    """At levels of noise by diffusers' own scheduler; the velocity is that of noise and clip, of which v is made."""
    theirs, ours = written("cogvideox", tmp_path, KINDS[kind]), load(tmp_path)
    latents, text = drawn(2, 4, 4, 4, 6), drawn(2, 5, 10)
    scheduler = diffusers.CogVideoXDDIMScheduler(snr_shift_scale=3.0 if kind == "2B" else 1.0, rescale_betas_zero_snr=True)
    levels = torch.tensor([999, 300])
    a, b = (part[levels].float() for part in (scheduler.alphas_cumprod.sqrt(), (1 - scheduler.alphas_cumprod).sqrt()))
    frames = 4 // KINDS[kind].get("patch_size_t", 1)
    turned = None if kind == "2B" else get_3d_rotary_pos_embed(16, ((0, 0), (2, 3)), (2, 3), frames)
    kept = latents * (a + b).view(2, 1, 1, 1, 1)
    with torch.no_grad():
        v = theirs(kept.transpose(1, 2), text, levels, image_rotary_emb=turned, return_dict=False)[0].transpose(1, 2)
        clean, noise = (x.view(2, 1, 1, 1, 1) for x in (a, b))
        expected = (noise * kept + clean * v) - (clean * kept - noise * v)
        got = ours(latents, 1000 * b / (a + b), Condition(text))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_a_generation_by_cogvideox_is_that_of_diffusers(tmp_path: Path) -> None:
    """DDIM by diffusers' scheduler, latents and all; sparse attention that keeps all is dense, text before the video."""
    theirs, ours = written("cogvideox", tmp_path), load(tmp_path)
    noise, text = drawn(1, 4, 3, 4, 6), drawn(1, 5, 10)
    settings = {"prediction_type": "v_prediction", "timestep_spacing": "trailing", "rescale_betas_zero_snr": True}
    scheduler = diffusers.CogVideoXDDIMScheduler(snr_shift_scale=3.0, **settings)
    scheduler.set_timesteps(5)
    latents = noise.transpose(1, 2)
    with torch.no_grad():
        for time in scheduler.timesteps:
            v = theirs(latents, text, time[None], return_dict=False)[0]
            latents = scheduler.step(v, int(time), latents, return_dict=False)[0]
    schedule = Preserving(3.0).flow(5)
    for way in ("dense", "nabla:mass=1.0"):
        made = generate(ours, noise, Condition(text), schedule, attention=way)
        torch.testing.assert_close(made.latents.transpose(1, 2), latents, rtol=0, atol=1e-3)
    assert generate(ours, noise, Condition(text), schedule, cache="first_block:0.5").latents.isfinite().all()


def test_hunyuan_video_generates_with_sparse_attention_and_caches(tmp_path: Path) -> None:
    """What keeps all is dense, in streams of their own and in one for both."""
    written("hunyuan", tmp_path)
    ours, noise = load(tmp_path), drawn(1, 4, 3, 4, 6)
    condition = Condition(drawn(1, 5, 16), pooled=drawn(1, 8))
    dense, whole, less = (
        generate(ours, noise, condition, flow(4, 3.0), attention=way).latents for way in ("dense", "nabla:mass=1.0", "ress")
    )
    torch.testing.assert_close(whole, dense, rtol=0, atol=1e-4)
    assert less.isfinite().all()
    for cache in ("first_block:0", "teacache:0"):
        assert torch.equal(generate(ours, noise, condition, flow(4, 3.0), cache=cache).latents, dense)
    assert generate(ours, noise, condition, flow(6, 3.0), cache="taylorseer:2,warm=1").cost.skipped["cond"] > 0


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
