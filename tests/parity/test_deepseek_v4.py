"""DeepSeek-V4 against transformers' real class at a tiny size: sliding, CSA and HCA layers, hash and scored experts, four streams."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.utils import logging

from mmsdk.decoder.deepseek_v4 import DeepseekV4Decoder
from mmsdk.errors import InputError, ModelError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.loop import collect, generate
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.three_level import ThreeLevelCache
from mmsdk.models.text.deepseek_v4 import preset, read_decoder

VOCABULARY, LENGTH, EXPERTS, CHOSEN = 300, 75, 6, 2
CSA, HCA, WINDOW = 4, 16, 8
KINDS = ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"]
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "moe_intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 4,
    "head_dim": 16, "q_lora_rank": 20, "num_experts_per_tok": CHOSEN, "n_routed_experts": EXPERTS, "layer_types": [*KINDS, *KINDS[1:]],
    "compress_rates": {"compressed_sparse_attention": CSA, "heavily_compressed_attention": HCA}, "hc_mult": 4, "sliding_window": WINDOW,
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe", "moe"], "o_groups": 2, "o_lora_rank": 6, "index_n_heads": 16,
    "index_head_dim": 8, "index_topk": 5, "partial_rotary_factor": 0.25, "max_position_embeddings": 512, "swiglu_limit": 0.5,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Progress bars of saving are no part of a test's output."""
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def randomised(**settings: object) -> DeepseekV4ForCausalLM:
    """Weights large enough that a mistake shows in the logits; sinks, gates, tables and biases are drawn too."""
    model, generator = DeepseekV4ForCausalLM(DeepseekV4Config(**SIZES, **settings)).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            size = 0.7 if name.endswith(("scale", "base", "sinks", "position_bias")) else 0.2
            weight.copy_(torch.randn(weight.shape, generator=generator) * size + ("norm" in name))
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.rand(VOCABULARY, EXPERTS, generator=generator).argsort(1)[:, :CHOSEN])
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(EXPERTS, generator=generator) * 0.3)
    return model


@pytest.fixture(scope="module")
def model() -> DeepseekV4ForCausalLM:
    return randomised()


@pytest.fixture(scope="module")
def decoder(model: DeepseekV4ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> DeepseekV4Decoder:
    return saved(model, tmp_path_factory.mktemp("v4"))


def saved(model: DeepseekV4ForCausalLM, folder: Path) -> DeepseekV4Decoder:
    """The same model as ours, by way of the folder that transformers writes: DeepSeek's own names of tensors."""
    model.save_pretrained(folder)
    return read_decoder(folder, torch.float32)


def ids_of(rows: int, length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def theirs(model: DeepseekV4ForCausalLM, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids, use_cache=False).logits
        return logits


@torch.no_grad()
def read(decoder: DeepseekV4Decoder, ids: Tensor, cache: ThreeLevelCache, positions: Tensor | None = None) -> Tensor:
    """Logits of new tokens, which go on from where the cache is."""
    places = cache.position[:, None] + torch.arange(ids.shape[1]) if positions is None else positions
    return decoder.logits(decoder(decoder.embed(ids), places, cache))


def test_logits_equal_transformers(model: DeepseekV4ForCausalLM, decoder: DeepseekV4Decoder) -> None:
    ids = ids_of(2)
    expected = theirs(model, ids)
    torch.testing.assert_close(read(decoder, ids, decoder.memory(2, 1)), expected, rtol=0, atol=1e-4)
    assert expected.std() > 0.3
    # every part of the past counts: without it the last token's logits are others
    alone = read(decoder, ids[:, -WINDOW:], decoder.memory(2, 1))
    assert (alone[:, -1] - expected[:, -1]).abs().max() > 0.01


def test_a_scaled_compressed_rope_equals_transformers(tmp_path: Path) -> None:
    model = randomised(rope_scaling=YARN)
    decoder, ids = saved(model, tmp_path), ids_of(1, 150)
    logits = read(decoder, ids, decoder.memory(1, 150))
    torch.testing.assert_close(logits, theirs(model, ids), rtol=0, atol=1e-4)
    assert (logits - theirs(randomised(), ids)).abs().max() > 0.01


@pytest.mark.parametrize("chunk", [1, CSA - 1, CSA, CSA + 1, HCA - 1, HCA, HCA + 1])
def test_ka_23_decoding_after_prefill_in_chunks_equals_one_pass(
    model: DeepseekV4ForCausalLM, decoder: DeepseekV4Decoder, chunk: int
) -> None:
    ids, cache = ids_of(2), decoder.memory(2, 8)
    logits = torch.cat([read(decoder, piece, cache) for piece in ids.split(chunk, dim=1)], dim=1)
    torch.testing.assert_close(logits, theirs(model, ids), rtol=0, atol=1e-4)


def test_one_token_after_a_prompt_of_any_length_equals_one_pass(model: DeepseekV4ForCausalLM, decoder: DeepseekV4Decoder) -> None:
    ids = ids_of(1, 40)
    expected = theirs(model, ids)
    for length in (1, WINDOW - 1, WINDOW, CSA * 2 - 1, HCA - 1, HCA, HCA + 1, 33):
        cache = decoder.memory(1, 40)
        read(decoder, ids[:, :length], cache)
        torch.testing.assert_close(read(decoder, ids[:, length : length + 1], cache)[0, 0], expected[0, length], rtol=0, atol=1e-4)


def test_greedy_tokens_equal_transformers(model: DeepseekV4ForCausalLM, decoder: DeepseekV4Decoder) -> None:
    ids, cache = ids_of(2, 21), decoder.memory(2, 60)
    with torch.no_grad():
        hidden = decoder(decoder.embed(ids), torch.arange(21).expand(2, -1), cache)
    steps = generate(decoder, hidden[:, -1], cache, [GenerationConfig(max_tokens=32)] * 2, lambda ids: "", frozenset())
    said = [list(row.ids) for row in collect(steps, 2)]
    whole = ids
    for _ in range(32):
        whole = torch.cat((whole, theirs(model, whole)[:, -1:].argmax(-1)), dim=1)
    assert said == whole[:, 21:].tolist()


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_pb_07_padded_rows_equal_single_runs_on_any_side(side: str, model: DeepseekV4ForCausalLM, decoder: DeepseekV4Decoder) -> None:
    lengths, most = (3, 18, 50), 60
    ids, positions = torch.zeros(3, most, dtype=torch.long), torch.full((3, most), -1)
    places = []
    for row, length in enumerate(lengths):
        start = {"left": most - length, "right": 0, "both": (most - length) // 2}[side]
        places.append(slice(start, start + length))
        ids[row, places[row]] = ids_of(1, length)[0]
        positions[row, places[row]] = torch.arange(length)
    cache, more = decoder.memory(3, 1), ids_of(3, 20)
    parts = [read(decoder, piece, cache, where) for piece, where in zip(ids.split(17, 1), positions.split(17, 1), strict=True)]
    logits, after = torch.cat(parts, 1), torch.cat([read(decoder, more[:, [step]], cache) for step in range(20)], 1)
    assert logits.isfinite().all() and cache.position.tolist() == [length + 20 for length in lengths]
    for row, place in enumerate(places):
        expected = theirs(model, torch.cat((ids[row : row + 1, place], more[row : row + 1]), 1))[0]
        torch.testing.assert_close(torch.cat((logits[row, place], after[row])), expected, rtol=0, atol=1e-4)


def test_ka_22_two_continuations_of_one_prefix_equal_fresh_runs(model: DeepseekV4ForCausalLM, decoder: DeepseekV4Decoder) -> None:
    ids, cache = ids_of(3, 60), decoder.memory(1, 64)
    read(decoder, ids[:1, :30], cache)
    for row, one in enumerate((cache.fork(), cache.fork(), cache)):
        whole = torch.cat((ids[:1, :30], ids[row : row + 1, 30:]), 1)
        torch.testing.assert_close(read(decoder, whole[:, 30:], one), theirs(model, whole)[:, 30:], rtol=0, atol=1e-4)


def test_ka_21_rows_selected_and_repeated_are_their_own(model: DeepseekV4ForCausalLM, decoder: DeepseekV4Decoder) -> None:
    ids, more, cache = ids_of(3, 29), ids_of(3, 40)[:, 20:], decoder.memory(3, 29)
    read(decoder, ids, cache)
    chosen = cache.select(torch.tensor([2, 2, 0]))
    whole = torch.cat((ids[[2, 2, 0]], more), 1)
    torch.testing.assert_close(read(decoder, more, chosen), theirs(model, whole)[:, 29:], rtol=0, atol=1e-4)
    torch.testing.assert_close(read(decoder, more, cache), theirs(model, torch.cat((ids, more), 1))[:, 29:], rtol=0, atol=1e-4)


def test_the_names_of_transformers_modules_are_read_too(model: DeepseekV4ForCausalLM, decoder: DeepseekV4Decoder, tmp_path: Path) -> None:
    """Experts as DeepSeek has them, one by one; everything else by the names of the modules."""
    state = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for expert, part in enumerate(tensor):
                state[name.replace("gate_up_proj", f"{expert}.w1.weight")], state[name.replace("gate_up_proj", f"{expert}.w3.weight")] = (
                    half.contiguous() for half in part.chunk(2)
                )
        elif name.endswith("experts.down_proj"):
            state |= {name.replace("down_proj", f"{expert}.w2.weight"): part.contiguous() for expert, part in enumerate(tensor)}
        else:
            state[name] = tensor.contiguous()
    save_file(state, tmp_path / "model.safetensors")
    model.config.save_pretrained(tmp_path)
    again = read_decoder(tmp_path, torch.float32).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in decoder.state_dict().items())


def test_half_precision_runs_and_keeps_small_tensors_wide(model: DeepseekV4ForCausalLM, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    half, ids = read_decoder(tmp_path, torch.bfloat16), ids_of(1, 33)
    assert half.layers[1].attention.sinks.dtype == torch.float32 and half.embedding.weight.dtype == torch.bfloat16
    # digits of every id survive the dtype
    assert torch.equal(half._ids(half.embed(torch.arange(VOCABULARY)[None])), torch.arange(VOCABULARY)[None])
    logits, exact = read(half, ids, half.memory(1, 33)), theirs(model, ids)
    assert (logits - exact).pow(2).mean().sqrt() < 0.15 * exact.std()


def test_what_is_not_supported_is_named(decoder: DeepseekV4Decoder, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="three levels"):
        decoder(decoder.embed(ids_of(1, 3)), torch.arange(3)[None], DenseCache.allocate(5, 1, 1, 16, 4, torch.float32, "cpu"))
    with pytest.raises(InputError, match="one by one"):
        decoder(decoder.embed(ids_of(1, 3)), torch.tensor([[0, 2, 3]]), decoder.memory(1, 4))
    with pytest.raises(ModelError, match="v4-flash, v4-pro"):
        preset("v4")
    DeepseekV4Config(**SIZES, scoring_func="sigmoid").save_pretrained(tmp_path)
    save_file({"embed.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="scoring_func"):
        read_decoder(tmp_path, torch.float32)


def test_presets_have_the_published_sizes() -> None:
    flash, pro = preset("v4-flash"), preset("v4-pro")
    assert (flash.layers, flash.stream, flash.heads, flash.index_topk, flash.mixture.experts) == (43, 4096, 64, 512, 256)
    assert (pro.layers, pro.stream, pro.heads, pro.index_topk, pro.mixture.experts) == (61, 7168, 128, 1024, 384)
    assert flash.kinds[:5] == ("sliding", "sliding", "csa", "hca", "csa") and pro.kinds[:4] == ("hca", "hca", "csa", "hca")
    billions = {}
    for name, config in (("flash", flash), ("pro", pro)):
        with torch.device("meta"):
            billions[name] = sum(weight.numel() for weight in DeepseekV4Decoder(config).parameters()) / 1e9
    # 284B and 1.6T are published, rounded and with the layer that predicts one token more
    assert 275 < billions["flash"] < 290 and 1550 < billions["pro"] < 1650
