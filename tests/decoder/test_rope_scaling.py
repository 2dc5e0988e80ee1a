"""Every way of stretching rotary positions, against transformers' functions and through its classes, for every decoder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

from mmsdk.decoder.rope import Dynamic, LongRope, Rope
from mmsdk.decoder.transformer import Decoder
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.none import NoCache
from mmsdk.models.text import read_config, read_decoder
from mmsdk.weights.fields import Fields

VOCABULARY, WIDTH, CONTEXT, ORIGINAL = 97, 48, 256, 64
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": CONTEXT,
}  # fmt: skip
GROUPED = {**COMMON, "num_key_value_heads": 2}
LATENT = {
    **COMMON, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 12,
    "v_head_dim": 12, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, GROUPED),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, GROUPED),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**GROUPED, "head_dim": 12}),
    "deepseek_v2": (DeepseekV2ForCausalLM, DeepseekV2Config, LATENT),
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config, {**LATENT, "n_group": 1, "topk_group": 1}),
}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn-mscale": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "mscale": 0.7, "mscale_all_dim": 1.2,
        "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0, 1.1, 1.2, 1.4, 1.5, 2.0],
        "long_factor": [1.0, 1.5, 2.5, 4.0, 5.0, 8.0],
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Progress bars of saving are no part of a test's output."""
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def model_of(family: str, scaling: str, context: int = CONTEXT) -> PreTrainedModel:
    kind, config, sizes = FAMILIES[family]
    model = kind(config(**sizes | {"max_position_embeddings": context}, rope_parameters={**SCALINGS[scaling], "rope_theta": 1e4}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.15 + ("norm" in name))
    return model.eval()


def ours(decoder: Decoder, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return decoder.logits(decoder(decoder.embed(ids), torch.arange(ids.shape[1]).expand_as(ids), NoCache()))


def ids_of(rows: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_decoder_has_the_logits_of_transformers(family: str, scaling: str, tmp_path: Path) -> None:
    """At a length that the scaling is for: the context of `dynamic` is short, as it is the one that is stretched."""
    model = model_of(family, scaling, ORIGINAL if scaling == "dynamic" else CONTEXT)
    model.save_pretrained(tmp_path)
    decoder, ids = read_decoder(tmp_path, torch.float32), ids_of(1, 150)
    with torch.no_grad():
        expected = model(ids).logits
    torch.testing.assert_close(ours(decoder, ids), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("length", [1, ORIGINAL, ORIGINAL + 1, 200, 100_000])
def test_frequencies_and_amplitude_are_those_of_transformers(scaling: str, length: int) -> None:
    config = LlamaConfig(**GROUPED | {"max_position_embeddings": ORIGINAL}, rope_parameters={**SCALINGS[scaling], "rope_theta": 5e5})
    reference, amplitude = ROPE_INIT_FUNCTIONS[SCALINGS[scaling]["rope_type"]](config, torch.device("cpu"), seq_len=length)
    read = read_config(Fields("config", config.to_dict()))
    rope = Rope(read.rotated, read.rope_theta, read.rope_scaling)
    assert read.rope_scaling.amplitude == pytest.approx(amplitude)
    # what turns by one radian a position tells the frequency
    turned = rope(torch.tensor([[1, length - 1]]), torch.float64)
    torch.testing.assert_close(torch.atan2(turned.sin, turned.cos)[0, 0, 0].float(), reference, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_rows_of_a_batch_go_by_their_own_lengths(scaling: str, tmp_path: Path) -> None:
    model = model_of("llama", scaling, ORIGINAL if scaling == "dynamic" else CONTEXT)
    model.save_pretrained(tmp_path)
    decoder, lengths = read_decoder(tmp_path, torch.float32), (20, ORIGINAL, 120)
    ids, positions = torch.zeros(3, 120, dtype=torch.long), torch.full((3, 120), -1)
    for row, length in enumerate(lengths):
        ids[row, 120 - length :], positions[row, 120 - length :] = ids_of(1, length)[0], torch.arange(length)
    with torch.no_grad():
        logits = decoder.logits(decoder(decoder.embed(ids), positions, NoCache()))
    for row, length in enumerate(lengths):
        alone = ours(decoder, ids_of(1, length))[0]
        torch.testing.assert_close(logits[row, 120 - length :], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_decoding_beyond_the_original_context_turns_as_transformers_does(scaling: str, tmp_path: Path) -> None:
    """The prompt ends before it and the answer behind it; cached keys stay as they were turned."""
    model = model_of("llama", scaling, ORIGINAL if scaling == "dynamic" else CONTEXT)
    model.save_pretrained(tmp_path)
    decoder, ids, prompt = read_decoder(tmp_path, torch.float32), ids_of(1, ORIGINAL + 6), ORIGINAL - 4
    config = decoder.config
    cache = DenseCache.allocate(config.layers, 1, config.kv_heads, config.entry, 80, torch.float32, "cpu")
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        for part in (slice(0, prompt), *(slice(at, at + 1) for at in range(prompt, ids.shape[1]))):
            positions = torch.arange(ids.shape[1])[None, part]
            expected = model(ids[:, part], None, positions, past).logits
            logits = decoder.logits(decoder(decoder.embed(ids[:, part]), positions, cache))
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_a_factor_left_out_is_the_ratio_of_the_contexts() -> None:
    settings = {key: value for key, value in SCALINGS["longrope"].items() if key != "factor"}
    read = read_config(Fields("config", {"model_type": "llama", **GROUPED, "rope_parameters": {**settings, "rope_theta": 1e4}}))
    config = LlamaConfig(**GROUPED, rope_parameters={**settings, "rope_theta": 1e4})
    _, amplitude = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"))
    assert isinstance(read.rope_scaling, LongRope) and read.rope_scaling.amplitude == pytest.approx(amplitude) and amplitude > 1


def test_dynamic_leaves_short_sequences_alone() -> None:
    plain, scaled = (Rope(12, 1e4, one) for one in (Dynamic(1.0, ORIGINAL), Dynamic(4.0, ORIGINAL)))
    positions = torch.arange(ORIGINAL)[None]
    assert torch.equal(plain(positions, torch.float32).cos, scaled(positions, torch.float32).cos)
    longer = torch.arange(ORIGINAL + 1)[None]
    assert not torch.equal(plain(longer, torch.float32).cos, scaled(longer, torch.float32).cos)
