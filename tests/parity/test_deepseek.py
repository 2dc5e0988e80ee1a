"""DeepSeek-V2, V3 and V3.2 against transformers' own classes, tiny and random, through folders that transformers wrote."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    PreTrainedModel,
)
from transformers.utils import logging

from mmsdk.attention.mla import AllSeen, Latent
from mmsdk.decoder.quantised import parts_of, scheme_of
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError, ModelError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.loop import collect, generate
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.none import NoCache
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.pages import Pages
from mmsdk.kv.rounded import RoundedPages
from mmsdk.kv.types import KVCache
from mmsdk.models.text import read_config, read_decoder
from mmsdk.quant.int4 import Int4
from mmsdk.quant.int8 import Int8
from mmsdk.quant.types import Scheme
from mmsdk.weights.fields import Fields

VOCABULARY, LENGTH = 211, 40
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 80, "max_position_embeddings": 256, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "moe_intermediate_size": 20, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
# From this many new tokens on, keys and values are made of the latents; with fewer, queries go into the latents' space.
EXPANDED = 13
GROUPS = {"n_group": 4, "topk_group": 2}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 1.2,
    "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
# With many heads no score is a sum of nothing but zeros, of which two would be equally good.
INDEXER = {"index_n_heads": 16, "index_head_dim": 12, "index_topk": 7}
FAMILIES = {
    "v2": DeepseekV2ForCausalLM(DeepseekV2Config(**SIZES, topk_method="group_limited_greedy", **GROUPS)),
    "v2-lite": DeepseekV2ForCausalLM(DeepseekV2Config(**SIZES | {"q_lora_rank": None}, rope_parameters=YARN, mlp_bias=True)),
    "v3": DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, **GROUPS, rope_parameters=YARN)),
    "v3-halves": DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, n_group=1, topk_group=1, rope_interleave=False, attention_bias=True)),
    "v3-tied": DeepseekV3ForCausalLM(
        DeepseekV3Config(**SIZES | {"q_lora_rank": None}, **GROUPS, norm_topk_prob=False, tie_word_embeddings=True)
    ),
    "v32": DeepseekV32ForCausalLM(DeepseekV32Config(**SIZES, **GROUPS, **INDEXER, rope_parameters=YARN)),
    "v32-mixed": DeepseekV32ForCausalLM(DeepseekV32Config(**SIZES, **GROUPS, **INDEXER, mlp_layer_types=["sparse", "dense", "sparse"])),
}
NATIVE = ["v2", "v3", "v32"]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Progress bars of saving are no part of a test's output."""
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def randomised(model: PreTrainedModel) -> PreTrainedModel:
    """Weights large enough that a mistake shows in the logits; norms, biases and the routers' balance are drawn too."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        drawn = [*model.named_parameters(), *((name, one) for name, one in model.named_buffers() if name.endswith("correction_bias"))]
        for name, weight in drawn:
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.15 + ("norm" in name and name.endswith("weight")))
    return model.eval()


def both(family: str, folder: Path) -> tuple[PreTrainedModel, Decoder]:
    """The model of transformers, and ours by way of a folder."""
    model = randomised(FAMILIES[family])
    model.save_pretrained(folder, max_shard_size="40KB")
    return model, read_decoder(folder, torch.float32)


def ids_of(rows: int, length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def theirs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids).logits
        return logits


def dense(decoder: Decoder, rows: int, capacity: int = 16) -> DenseCache:
    config = decoder.config
    return DenseCache.allocate(config.layers, rows, config.kv_heads, config.entry, capacity, torch.float32, "cpu")


def paged(decoder: Decoder, rows: int) -> PagedCache:
    config = decoder.config
    pages = Pages(config.layers, config.kv_heads, config.entry, 60, torch.float32, "cpu", page=4)
    pages.keys.fill_(torch.nan)
    pages.values.fill_(torch.nan)
    return PagedCache.empty(pages, rows)


def read(decoder: Decoder, ids: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
    with torch.no_grad():
        return decoder.logits(decoder(decoder.embed(ids), positions, cache))


def in_chunks(decoder: Decoder, ids: Tensor, cache: KVCache, chunk: int) -> Tensor:
    parts = []
    for piece in ids.split(chunk, dim=1):
        parts.append(read(decoder, piece, cache.position[:, None] + torch.arange(piece.shape[1]), cache))
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    model, decoder = both(family, tmp_path)
    ids = ids_of(2)
    expected = theirs(model, ids)
    ours = read(decoder, ids, torch.arange(LENGTH).expand_as(ids), NoCache())
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    assert expected.std() > 0.3


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_writes_the_32_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    model, decoder = both(family, tmp_path)
    prompt = ids_of(1, 20)
    model.generation_config.eos_token_id = None
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, do_sample=False)[0, 20:].tolist()
    cache = dense(decoder, 1)
    with torch.no_grad():
        hidden = decoder(decoder.embed(prompt), torch.arange(20)[None], cache)
        (row,) = collect(generate(decoder, hidden[:, -1], cache, [GenerationConfig(max_tokens=32)], lambda ids: "", frozenset()), 1)
    assert list(row.ids) == expected and len(set(expected)) > 4


@pytest.mark.parametrize("chunk", [1, 3, EXPANDED - 2, EXPANDED - 1, EXPANDED])
@pytest.mark.parametrize("family", NATIVE)
def test_ka_23_decoding_in_chunks_equals_one_pass(family: str, chunk: int, tmp_path: Path) -> None:
    model, decoder = both(family, tmp_path)
    assert isinstance(decoder.config.attention, Latent) and decoder.config.attention.absorbs(chunk) == (chunk < EXPANDED)
    ids = ids_of(2)
    expected = theirs(model, ids)
    for cache in (dense(decoder, 2), paged(decoder, 2)):
        torch.testing.assert_close(in_chunks(decoder, ids, cache, chunk), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("family", NATIVE)
def test_pb_07_rows_of_unequal_length_equal_single_ones(family: str, side: str, tmp_path: Path) -> None:
    model, decoder = both(family, tmp_path)
    lengths, most = (2, 17, 31), 34
    ids, positions, places = torch.zeros(3, most, dtype=torch.long), torch.full((3, most), -1), []
    for row, length in enumerate(lengths):
        start = {"left": most - length, "right": 0, "both": (most - length) // 2}[side]
        places.append(slice(start, start + length))
        ids[row, places[row]], positions[row, places[row]] = ids_of(1, length)[0], torch.arange(length)
    for make in (dense, paged):
        cache = make(decoder, 3)
        logits = read(decoder, ids, positions, cache)
        later = in_chunks(decoder, ids_of(3, 4), cache, 1)
        assert cache.position.tolist() == [length + 4 for length in lengths]
        for row, place in enumerate(places):
            whole = torch.cat((ids[row, place], ids_of(3, 4)[row]))
            expected = theirs(model, whole[None])[0]
            torch.testing.assert_close(torch.cat((logits[row, place], later[row])), expected, rtol=0, atol=1e-4)


def test_with_room_for_all_entries_the_indexer_changes_nothing(tmp_path: Path) -> None:
    _, decoder = both("v32", tmp_path)
    sparse = decoder.config.attention
    assert isinstance(sparse, Latent) and not isinstance(sparse.indexer, AllSeen)
    wide = replace(sparse, indexer=replace(sparse.indexer, topk=LENGTH))
    all_seen = {name: tensor for name, tensor in decoder.state_dict().items() if ".indexer." not in name}
    dense_decoder = Decoder.of(replace(decoder.config, attention=replace(sparse, indexer=AllSeen())), all_seen)
    wide_decoder = Decoder.of(replace(decoder.config, attention=wide), decoder.state_dict())
    ids, positions = ids_of(1), torch.arange(LENGTH)[None]
    expected = read(dense_decoder, ids, positions, NoCache())
    assert torch.equal(read(wide_decoder, ids, positions, NoCache()), expected)
    narrow = read(decoder, ids, positions, NoCache())
    torch.testing.assert_close(narrow[:, :7], expected[:, :7], rtol=0, atol=1e-5)
    assert (narrow[:, 7:] - expected[:, 7:]).abs().max() > 0.01


def test_a_token_takes_576_numbers_of_a_layer_where_heads_of_their_own_take_40960() -> None:
    config = read_config(Fields("V3", {"model_type": "deepseek_v3"}))
    assert (config.kv_heads, config.entry) == (1, (576, 0))
    assert read_config(Fields("V3.2", {"model_type": "deepseek_v32"})).entry == (576, 128)
    cache = DenseCache.allocate(2, 3, config.kv_heads, config.entry, 5, torch.bfloat16, "cpu")
    heads = config.heads * (config.head_dim + 128)  # a key and a value of each
    assert cache.nbytes == 2 * 3 * 5 * 576 * 2 and heads == 40_960 and heads / 576 > 71
    pages = Pages(2, config.kv_heads, config.entry, 4, torch.bfloat16, "cpu")
    assert pages.block_bytes == 16 * 576 * 2


def test_routers_stay_in_float32_in_a_narrower_decoder(tmp_path: Path) -> None:
    model, _ = both("v32", tmp_path)
    decoder = read_decoder(tmp_path, torch.bfloat16)
    wide = {name for name, tensor in decoder.state_dict().items() if tensor.dtype == torch.float32}
    assert wide and all("router" in name or name.endswith("indexer.weights.weight") for name in wide)
    assert torch.equal(
        decoder.state_dict()["layers.1.mlp.router.bias"], model.state_dict()["model.layers.1.mlp.gate.e_score_correction_bias"]
    )
    logits = read(decoder, ids_of(1), torch.arange(LENGTH)[None], NoCache())
    assert logits.isfinite().all() and logits.dtype == torch.float32


def test_layers_that_predict_further_ahead_are_left_out_and_other_tensors_are_not(tmp_path: Path) -> None:
    model = randomised(FAMILIES["v3"])
    model.save_pretrained(tmp_path)
    expected = read_decoder(tmp_path, torch.float32).state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    assert read_decoder(tmp_path, torch.float32).state_dict().keys() == expected.keys()
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.4\.eh_proj"):
        read_decoder(tmp_path, torch.float32)


def test_fp8_in_blocks_is_read_as_its_numbers_times_their_scales(tmp_path: Path) -> None:
    """Blocks of 16 x 8, so that some are cut off at the edges of a matrix. The wide model is made of the same numbers by plain loops."""
    model = randomised(FAMILIES["v3"])
    model.save_pretrained(tmp_path)
    tensors, wide = load_file(tmp_path / "model.safetensors"), dict[str, Tensor]()
    for name in [name for name in tensors if "proj" in name and name.endswith("weight")]:
        rows, columns = tensors[name].shape
        scales = torch.rand(-(-rows // 16), -(-columns // 8), generator=torch.Generator().manual_seed(rows)) + 0.5
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        wide[name] = tensors[name].float()
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                wide[name][16 * i : 16 * i + 16, 8 * j : 8 * j + 8] *= scales[i, j]
        tensors[name + "_scale_inv"] = scales
    save_file(tensors, tmp_path / "model.safetensors")
    settings = json.loads((tmp_path / "config.json").read_text())
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 8], "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps({**settings, "quantization_config": quantization}))
    decoder = read_decoder(tmp_path, torch.float32)
    model.load_state_dict({**model.state_dict(), **_fused(wide, model)})
    ids = ids_of(1)
    torch.testing.assert_close(read(decoder, ids, torch.arange(LENGTH)[None], NoCache()), theirs(model, ids), rtol=0, atol=1e-4)
    save_file({**tensors, "model.layers.0.self_attn.o_proj.weight_scale_inv": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"o_proj\.weight_scale_inv.*must be \(3, 3\)"):
        read_decoder(tmp_path, torch.float32)


def _fused(tensors: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Experts together, as transformers has them in memory."""
    plain = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in (1, 2):
        own = f"model.layers.{layer}.mlp.experts."
        parts = [[tensors[f"{own}{i}.{part}_proj.weight"] for i in range(8)] for part in ("gate", "up", "down")]
        plain[own + "gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(*parts[:2], strict=True)])
        plain[own + "down_proj"] = torch.stack(parts[2])
    assert plain.keys() <= model.state_dict().keys()
    return plain


def test_what_is_not_there_for_latents_is_refused(tmp_path: Path) -> None:
    _, decoder = both("v3", tmp_path)
    config = decoder.config
    with pytest.raises(InputError, match="latents"):
        RoundedPages(Pages(config.layers, config.kv_heads, config.entry, 4, torch.float32, "cpu"), "int8", 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v2", "topk_method": "random"}, "topk_method"),
        ({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "norm_topk_prob": True}, "norm_topk_prob"),
        ({"model_type": "deepseek_v2"}, "num_experts_per_tok"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "scoring_func"),
        ({"model_type": "deepseek_v3", "n_group": 7}, "groups"),
        ({"model_type": "deepseek_v3", "num_experts_per_tok": 200}, "chosen"),
        ({"model_type": "deepseek_v3", "qk_rope_head_dim": 3}, "rope is 3"),
        ({"model_type": "deepseek_v3", "v_head_dim": 300}, "values of 300"),
        ({"model_type": "deepseek_v3", "first_k_dense_replace": 10**12, "num_hidden_layers": 10**12}, "layers"),
        ({"model_type": "deepseek_v32", "index_topk": 0}, "topk is 0"),
        ({"model_type": "deepseek_v32", "index_head_dim": 32}, "indexer"),
        ({"model_type": "deepseek_v32", "mlp_layer_types": ["wide"]}, "mlp_layer_types"),
    ],
)
def test_settings_that_cannot_be_run_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(Fields("config", change))


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("family", NATIVE)
def test_matrices_in_fewer_bits_are_those_that_their_codes_stand_for(family: str, scheme: Scheme, tmp_path: Path) -> None:
    """Attention's but W_UK and W_UV, and every expert's by itself; what chooses stays wide."""
    model, wide = both(family, tmp_path)
    rounded, ids = read_decoder(tmp_path, torch.float32, scheme), ids_of(2)
    quantised = {name for name, _ in wide.named_parameters() if scheme_of(name, wide.config, scheme) != "none"}
    assert {name.partition(".")[2].partition(".")[2] for name in quantised if name.startswith("layers.1.")} == {
        "attention.q_down.weight", "attention.q_up.weight", "attention.kv_down.weight", "attention.o.weight", "mlp.experts.gate_up",
        "mlp.experts.down", "mlp.shared.gate_up.weight", "mlp.shared.down.weight",
    }  # fmt: skip
    for name in quantised:
        tensor = wide.get_parameter(name)
        parts = tensor.detach().chunk(parts_of(name, wide))
        kind = scheme_of(name, wide.config, scheme)
        tensor.data = torch.cat([(Int4.of(part) if kind == "int4" else Int8.of(part)).dequantised() for part in parts])
    positions = torch.arange(LENGTH).expand_as(ids)
    found, exact = (read(decoder, ids, positions, dense(decoder, 2)) for decoder in (rounded, wide))
    # few rows of an expert go through kernels that take bfloat16
    assert (found - exact).square().mean().sqrt() < 0.05 * exact.std()
    assert (exact - theirs(model, ids)).abs().max() > 0.005
