"""Folders of diffusers, written by its own pipelines at tiny size: what comes out is the clip that the pipeline itself makes."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import BertPreTokenizer
from torch import Tensor

from mmsdk.diffusion.borrowed import PIPELINES, Borrowed, borrowed
from mmsdk.diffusion.filming import VideoGeneration
from mmsdk.errors import InputError, ModelError, WeightsError
from mmsdk.pipeline import pipeline

with warnings.catch_warnings():
    # what diffusers itself warns of while it is imported is not ours
    warnings.simplefilter("ignore")
    diffusers = pytest.importorskip("diffusers")
    import transformers

pytestmark = pytest.mark.filterwarnings("ignore")
CPU = torch.device("cpu")
TEXT, AGAINST = "a red ball moves left", "a blue box"
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 64}


def words(longest: int) -> Any:
    """A tokenizer of few words, padded and cut as those of T5 are."""
    known = ["<pad>", "</s>", "<unk>", *sorted({*TEXT.split(), *AGAINST.split()})]
    plain = Tokenizer(WordLevel({word: number for number, word in enumerate(known)}, "<unk>"))
    plain.pre_tokenizer = BertPreTokenizer()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=longest
    )


def wan() -> Any:
    return diffusers.WanPipeline(
        tokenizer=words(512),
        text_encoder=transformers.UMT5EncoderModel(transformers.UMT5Config(**T5)),
        vae=diffusers.AutoencoderKLWan(
            base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, text_dim=16, freq_dim=16, ffn_dim=16, num_layers=2
        ),
    )


def ltx() -> Any:
    scaling, layers, sides = (True, True, True, False), (1,) * 5, (8,) * 4
    return diffusers.LTXPipeline(
        tokenizer=words(128),
        text_encoder=transformers.T5EncoderModel(transformers.T5Config(**T5)),
        vae=diffusers.AutoencoderKLLTXVideo(
            latent_channels=8, block_out_channels=sides, decoder_block_out_channels=sides, layers_per_block=layers,
            decoder_layers_per_block=layers, spatio_temporal_scaling=scaling, decoder_spatio_temporal_scaling=scaling,
            decoder_inject_noise=(False,) * 5, upsample_residual=(False,) * 4, upsample_factor=(1,) * 4, patch_size=4, patch_size_t=1,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, max_image_seq_len=4096, shift_terminal=0.1
        ),
        transformer=diffusers.LTXVideoTransformer3DModel(
            in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16, num_layers=2,
            caption_channels=16,
        ),
    )  # fmt: skip


def cogvideox() -> Any:
    return diffusers.CogVideoXPipeline(
        tokenizer=words(226),
        text_encoder=transformers.T5EncoderModel(transformers.T5Config(**T5)),
        vae=diffusers.AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4, block_out_channels=(8,) * 4,
            latent_channels=4, layers_per_block=1, norm_num_groups=2, temporal_compression_ratio=4,
        ),
        scheduler=diffusers.CogVideoXDDIMScheduler(
            beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, clip_sample=False, set_alpha_to_one=True,
            prediction_type="v_prediction", rescale_betas_zero_snr=True, snr_shift_scale=3.0, timestep_spacing="trailing",
        ),
        transformer=diffusers.CogVideoXTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=16, num_layers=2,
            sample_width=6, sample_height=4, sample_frames=9, max_text_seq_length=226,
        ),
    )  # fmt: skip


def hunyuan() -> Any:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 64}
    return diffusers.HunyuanVideoPipeline(
        tokenizer=words(512),
        text_encoder=transformers.LlamaModel(transformers.LlamaConfig(**small, num_hidden_layers=3)),
        text_encoder_2=transformers.CLIPTextModel(
            transformers.CLIPTextConfig(**small, num_hidden_layers=1, projection_dim=16, eos_token_id=1, pad_token_id=0, bos_token_id=2)
        ),
        tokenizer_2=words(77),
        vae=diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(8,) * 4, layers_per_block=1, norm_num_groups=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * 4,
            up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        transformer=diffusers.HunyuanVideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1, num_single_layers=1,
            num_refiner_layers=1, patch_size=2, text_embed_dim=16, pooled_projection_dim=16, rope_axes_dim=(2, 4, 4), mlp_ratio=2.0,
        ),
    )  # fmt: skip


MADE = {"WanPipeline": wan, "LTXPipeline": ltx, "CogVideoXPipeline": cogvideox, "HunyuanVideoPipeline": hunyuan}
SIZES = {"WanPipeline": (5, 32, 32), "LTXPipeline": (9, 64, 64), "CogVideoXPipeline": (9, 32, 48), "HunyuanVideoPipeline": (5, 32, 32)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """Each family's pipeline, its norms and biases off their first values, and the folder that it was saved to."""
    found = {}
    for name, make in MADE.items():
        torch.manual_seed(0)
        pipe = make()
        for number, weight in enumerate(pipe.transformer.parameters()):
            weight.data += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                part.eval()
        folder = tmp_path_factory.mktemp(name)
        pipe.save_pretrained(folder)
        pipe.set_progress_bar_config(disable=True)
        found[name] = pipe, folder
    return found


def test_all_families_are_tried() -> None:
    assert set(MADE) == set(PIPELINES)


@pytest.mark.parametrize("name", list(MADE))
def test_the_clip_is_the_one_that_diffusers_makes(name: str, folders: dict[str, tuple[Any, Path]]) -> None:
    """The text, the steps, the guidance and the autoencoder: all of it, from the same noise."""
    pipe, folder = folders[name]
    frames, height, width = SIZES[name]
    ours = pipeline("video-generation", folder, dtype="float32")
    clip = ours(
        TEXT,
        seed=3,
        steps=3,
        guidance=2.0,
        against="" if name.startswith("Hunyuan") else AGAINST,
        frames=frames,
        height=height,
        width=width,
    )
    shape = ours.maker.shape(ours.maker.screen.sized(frames, height, width))
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    asked = {"negative_prompt": None if name.startswith("Hunyuan") else AGAINST, "latents": as_theirs(name, pipe, noise)}
    theirs = pipe(TEXT, num_frames=frames, height=height, width=width, num_inference_steps=3, guidance_scale=2.0, output_type="pt", **asked)
    expected = (theirs.frames[0] * 255).round()
    assert clip.frames.shape == expected.shape == (frames, 3, height, width)
    assert (clip.frames.float() - expected).abs().max() <= 1 and clip.frames.float().std() > 0
    assert clip.timings.total > 0 and clip.source == TEXT and clip.seed == 3


def as_theirs(name: str, pipe: Any, noise: Tensor) -> Tensor:
    if name == "LTXPipeline":
        packed: Tensor = pipe._pack_latents(noise, 1, 1)
        return packed
    return noise.transpose(1, 2) if name == "CogVideoXPipeline" else noise


def test_what_makes_it_faster_goes_together_and_sizes_are_told(folders: dict[str, tuple[Any, Path]]) -> None:
    pipe = pipeline("video-generation", folders["WanPipeline"][1], dtype="float32")
    assert isinstance(pipe, VideoGeneration) and "frames=81" in repr(pipe)
    fast = pipe(TEXT, steps=4, two_stage=True, attention="nabla:1.0", cache="taylorseer:2,warm=1", frames=5, height=32, width=32)
    assert fast.latents.isfinite().all() and fast.frames.shape == (5, 3, 32, 32)
    for size, told in (({"frames": 6}, "multiple of 4"), ({"height": 40}, "multiples of 16"), ({"width": 8}, "multiples of 16")):
        with pytest.raises(InputError, match=told):
            pipe(TEXT, **{"frames": 5, "height": 32, "width": 32} | size)
    hunyuan = pipeline("video-generation", folders["HunyuanVideoPipeline"][1], dtype="float32")
    with pytest.raises(InputError, match="distilled"):
        hunyuan(TEXT, against=AGAINST, steps=1, frames=5, height=32, width=32)


def changed(folder: Path, into: Path, **told: object) -> Path:
    shutil.copytree(folder, into)
    index = json.loads((into / "model_index.json").read_text()) | told
    (into / "model_index.json").write_text(json.dumps(index))
    return into


def opened(folder: Path) -> Borrowed:
    return borrowed(folder, torch.float32, CPU)


def test_what_cannot_be_run_is_told_by_its_name(folders: dict[str, tuple[Any, Path]], tmp_path: Path) -> None:
    _, folder = folders["WanPipeline"]
    with pytest.raises(ModelError, match="MochiPipeline; clips are made by WanPipeline"):
        opened(changed(folder, tmp_path / "mochi", _class_name="MochiPipeline"))
    with pytest.raises(ModelError, match="transformer_2"):
        opened(changed(folder, tmp_path / "two", transformer_2=["diffusers", "WanTransformer3DModel"]))
    with pytest.raises(ModelError, match="its vae is .*AutoencoderKL'.*known is AutoencoderKLWan"):
        opened(changed(folder, tmp_path / "vae", vae=["diffusers", "AutoencoderKL"]))
    # a class of the folder's own would be code to run
    with pytest.raises(ModelError, match="text_encoder is .'mine'"):
        opened(changed(folder, tmp_path / "mine", text_encoder=["mine", "UMT5EncoderModel"]))
    whole = changed(folder, tmp_path / "none")
    shutil.rmtree(whole / "text_encoder")
    with pytest.raises(ModelError, match="its text_encoder is missing"):
        opened(whole)
    pickled = changed(folder, tmp_path / "pickled")
    (pickled / "vae" / "diffusion_pytorch_model.safetensors").rename(pickled / "vae" / "diffusion_pytorch_model.bin")
    with pytest.raises(WeightsError, match="vae cannot be read"):
        opened(pickled)
