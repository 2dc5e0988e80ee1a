"""The decoder against transformers: SmolLM2-135M as it is, and tiny Llamas, Qwen2s and Qwen3s through folders that transformers wrote."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

from mmsdk.decoder.rope import Unscaled
from mmsdk.decoder.transformer import Decoder
from mmsdk.generate.beams import search
from mmsdk.generate.config import GenerationConfig
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.none import NoCache
from mmsdk.models.text import load_decoder, read_decoder
from mmsdk.tokenizer import TextTokenizer

T = TypeVar("T")
VOCABULARY, LENGTH = 211, 90
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 80, "max_position_embeddings": 256,
}  # fmt: skip
FAMILIES = {
    "llama": LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama-tied-biased": LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    "qwen2": Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen2-tied": Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "qwen3-tied": Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        "rope_theta": 500.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4},
    "yarn-mscale": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 1.2,
        "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False,
    },
}  # fmt: skip
PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a little",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three primary colours are",
    "Question: What is on the table?\nAnswer:",
    "In 1969, astronauts",
    "A recipe for bread needs flour,",
    "Dear Sir or Madam,\n\nI am writing",
    "The robot picked up the red cube and",
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Progress bars of saving and loading are no part of a test's output."""
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def randomised(model: PreTrainedModel) -> PreTrainedModel:
    """Weights large enough that a mistake shows in the logits; norms and biases are drawn too."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.15 + ("norm" in name))
    return model.eval()


def saved(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """The same model as our decoder, by way of shards in a folder."""
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return read_decoder(folder, dtype)


def ids_of(rows: int, length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def ours(decoder: Decoder, ids: Tensor) -> Tensor:
    """Logits of whole rows in one pass."""
    with torch.no_grad():
        return decoder.logits(decoder(decoder.embed(ids), torch.arange(ids.shape[1]).expand_as(ids), NoCache()))


def theirs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids).logits
        return logits


def cached(decoder: Decoder, rows: int, capacity: int = 16, dtype: torch.dtype = torch.float32) -> DenseCache:
    config = decoder.config
    return DenseCache.allocate(config.layers, rows, config.kv_heads, config.head_dim, capacity, dtype, "cpu")


def greedy(decoder: Decoder, rows: list[list[int]], steps: int) -> list[list[int]]:
    """The likeliest token of every row, again and again, from a left-padded batch."""
    length = max(map(len, rows))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    positions = torch.tensor([[-1] * (length - len(row)) + list(range(len(row))) for row in rows])
    cache, out = cached(decoder, len(rows), length + steps), []
    with torch.no_grad():
        hidden = decoder(decoder.embed(ids), positions, cache)
        for _ in range(steps):
            out.append(decoder.logits(hidden[:, -1]).argmax(-1))
            hidden = decoder(decoder.embed(out[-1][:, None]), cache.position[:, None], cache)
    return torch.stack(out, 1).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family_equal_transformers(family: str, tmp_path: Path) -> None:
    model = randomised(FAMILIES[family])
    ids = ids_of(2)
    expected = theirs(model, ids)
    torch.testing.assert_close(ours(saved(model, tmp_path), ids), expected, rtol=0, atol=1e-4)
    assert expected.std() > 0.3


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scaling_equals_transformers_and_is_not_ignored(name: str, tmp_path: Path) -> None:
    model = randomised(LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=SCALINGS[name])))
    decoder, ids = saved(model, tmp_path), ids_of(1, 200)
    torch.testing.assert_close(ours(decoder, ids), theirs(model, ids), rtol=0, atol=1e-4)
    unscaled = Decoder.of(replace(decoder.config, rope_scaling=Unscaled()), decoder.state_dict())
    assert (ours(unscaled, ids) - ours(decoder, ids)).abs().max() > 0.01


@pytest.mark.parametrize("chunk", [1, 3, LENGTH])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_decoding_in_chunks_equals_one_pass(family: str, chunk: int, tmp_path: Path) -> None:
    model = randomised(FAMILIES[family])
    decoder, ids = saved(model, tmp_path), ids_of(2, 30 if chunk == 1 else LENGTH)
    cache, parts = cached(decoder, 2), []
    with torch.no_grad():
        for piece in ids.split(chunk, dim=1):
            positions = cache.position[:, None] + torch.arange(piece.shape[1])
            parts.append(decoder.logits(decoder(decoder.embed(piece), positions, cache)))
    torch.testing.assert_close(torch.cat(parts, 1), theirs(model, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_pb_07_padded_rows_equal_single_runs_on_any_side(side: str, tmp_path: Path) -> None:
    model = randomised(FAMILIES["qwen2"])
    decoder, lengths, most = saved(model, tmp_path), (5, 50, 200), 220
    ids, positions = torch.zeros(3, most, dtype=torch.long), torch.full((3, most), -1)
    places = []
    for row, length in enumerate(lengths):
        start = {"left": most - length, "right": 0, "both": (most - length) // 2}[side]
        places.append(slice(start, start + length))
        ids[row, places[row]] = ids_of(1, length)[0]
        positions[row, places[row]] = torch.arange(length)
    cache = cached(decoder, 3)
    with torch.no_grad():
        hidden = decoder(decoder.embed(ids), positions, cache)
    assert hidden.isfinite().all() and cache.position.tolist() == list(lengths)
    for row, place in enumerate(places):
        expected = theirs(model, ids[row : row + 1, place])[0]
        torch.testing.assert_close(decoder.logits(hidden[row, place]), expected, rtol=0, atol=1e-4)


def test_pb_08_padded_batches_of_embeddings_decode_as_one_by_one(tmp_path: Path) -> None:
    decoder = saved(randomised(FAMILIES["llama"]), tmp_path)
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randn(length, decoder.config.width, generator=generator) * 0.15 for length in (3, 17, 40)]

    def decode(batch: list[Tensor]) -> list[list[int]]:
        most = max(map(len, batch))
        x, positions = torch.zeros(len(batch), most, decoder.config.width), torch.full((len(batch), most), -1)
        for row, embedded in enumerate(batch):
            x[row, most - len(embedded) :], positions[row, most - len(embedded) :] = embedded, torch.arange(len(embedded))
        cache, out = cached(decoder, len(batch)), []
        with torch.no_grad():
            hidden = decoder(x, positions, cache)
            for _ in range(32):
                out.append(decoder.logits(hidden[:, -1]).argmax(-1))
                hidden = decoder(decoder.embed(out[-1][:, None]), cache.position[:, None], cache)
        return torch.stack(out, 1).tolist()

    assert decode(rows) == [decode([row])[0] for row in rows]


def test_pb_13_strangers_in_the_batch_change_nothing(tmp_path: Path) -> None:
    model = randomised(FAMILIES["qwen3"])
    decoder = saved(model, tmp_path)
    rows = [ids_of(1, length)[0].tolist() for length in (9, 1, 30, 4, 17, 2, 60, 11)]
    assert greedy(decoder, rows, 24)[0] == greedy(decoder, rows[:1], 24)[0]
    half = decoder.to(torch.bfloat16)
    ids = torch.tensor([rows[0], *ids_of(7, 9).tolist()])
    torch.testing.assert_close(ours(half, ids)[0], ours(half, ids[:1])[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_pb_17_half_precision_runs_like_transformers(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = randomised(FAMILIES[family])
    decoder, ids = saved(model, tmp_path, dtype), ids_of(2, 40)
    exact = theirs(model, ids)
    reference = theirs(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype), ids).float()
    logits = ours(decoder, ids)
    assert logits.dtype == torch.float32
    assert (logits - exact).pow(2).mean().sqrt() < 1.2 * (reference - exact).pow(2).mean().sqrt() + 1e-3
    large = torch.full((1, 4, SIZES["hidden_size"]), 3000.0, dtype=dtype)  # its squares are beyond float16
    with torch.no_grad():
        assert decoder(large, torch.arange(4)[None], NoCache()).isfinite().all()


@dataclass(frozen=True, slots=True)
class Real:
    model: PreTrainedModel
    decoder: Decoder
    tokenizer: TextTokenizer


@pytest.fixture(scope="module")
def real(mini_language: Path) -> Real:
    """SmolLM2-135M twice, from the same file in float32: read by transformers and by us."""
    model = AutoModelForCausalLM.from_pretrained(mini_language.parent, gguf_file=mini_language.name, dtype=torch.float32).eval()
    return Real(model, *load_decoder(mini_language, torch.float32))


def test_smollm2_has_the_logits_of_transformers(real: Real) -> None:
    for prompt in PROMPTS[:3]:
        ids = torch.tensor([real.tokenizer.encode(prompt)])
        torch.testing.assert_close(ours(real.decoder, ids), theirs(real.model, ids), rtol=0, atol=1e-3)


def test_smollm2_writes_the_tokens_of_transformers_on_ten_prompts(real: Real) -> None:
    """So many that a difference would have shown; `mmsdk bench parity` writes 128."""
    tokens = 48
    rows = [real.tokenizer.encode(prompt) for prompt in PROMPTS]
    length = max(map(len, rows))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    out = real.model.generate(
        ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )  # fmt: skip
    assert greedy(real.decoder, rows, tokens) == out[:, length:].tolist()


def test_smollm2_alone_writes_what_it_writes_in_a_batch(real: Real) -> None:
    rows = [real.tokenizer.encode(prompt) for prompt in PROMPTS[:4]]
    assert greedy(real.decoder, rows, 24)[1:2] == greedy(real.decoder, rows[1:2], 24)


def test_smollm2_finds_the_answers_of_transformers_beams_and_their_scores(real: Real) -> None:
    """All of four beams, of two prompts in one batch; a word of those would show what changed places wrongly."""
    rows, beams, tokens = [real.tokenizer.encode(prompt) for prompt in PROMPTS[:2]], 4, 12
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    at = torch.tensor([[-1] * (longest - len(row)) + list(range(len(row))) for row in rows])
    out = real.model.generate(
        ids, attention_mask=(at >= 0).long(), max_new_tokens=tokens, do_sample=False, num_beams=beams, num_return_sequences=beams,
        eos_token_id=2, pad_token_id=2, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    config = real.decoder.config
    cache = DenseCache.allocate(config.layers, 2, config.kv_heads, config.head_dim, longest, torch.float32, "cpu")
    with torch.no_grad():
        hidden = real.decoder(real.decoder.embed(ids), at, cache)[:, -1]
    settings = GenerationConfig(max_tokens=tokens, num_beams=beams)
    found = search(real.decoder, hidden, cache, [settings] * 2, real.tokenizer.decode, frozenset({2}))
    flat = [answer for row in found for answer in row]
    assert [list(answer.ids) for answer in flat] == [[token for token in row if token != 2] for row in out.sequences[:, longest:].tolist()]
    assert [answer.score for answer in flat] == pytest.approx(out.sequences_scores.tolist(), rel=1e-4)
