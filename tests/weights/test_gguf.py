"""GGUF: values against the gguf package's own reader and dequantiser, models against transformers, and files that lie."""

import contextlib
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import ModelError, WeightsError
from mmsdk.kv.none import NoCache
from mmsdk.tokenizer import TextTokenizer
from mmsdk.weights.gguf import read_gguf
from mmsdk.weights.gguf_blocks import unpack
from mmsdk.weights.gguf_file import read_file
from mmsdk.weights.gguf_tokenizer import tokenizer_of

SIZES = {
    "vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 128,
}  # fmt: skip
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rms_norm_eps=1e-5)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True, rms_norm_eps=1e-5)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32, rms_norm_eps=1e-5)),
}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers.": "blk.",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_", "mlp.": "ffn_", "_proj": "",
}  # fmt: skip
CORPUS = [
    "The quick brown fox, isn't it?  Two  spaces   and\ttabs\n\n\nlines \r\n end   ",
    "naïve café — “quotes” … ½ ² ªº ΑΒΓ привет שלום مرحبا नमस्ते",
    "日本語のテキストと中文字符、以及한국어 문장.",
    "😀👩‍👩‍👧‍👦🏳️‍🌈🇫🇷 emoji 🤖\u200d\ufe0f\u00a0nbsp\u3000wide",
    "def f(x):\n    return {'a': [x**2, \"b\"]}  # comment\n\tpass",
    "WE'LL we'll I'M don't 'S ''d",
    "\x00\x01\x7f\ufffd\U0010ffff a\u0301e\u0301",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><repo_name><|im_start",
    "",
    " ",
    "\n",
]


def written(path: Path, architecture: str, model: PreTrainedModel, kind: Kind = Kind.F32, **more: object) -> Path:
    """A model as a GGUF file with a byte-level tokenizer, by the gguf package's writer."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    if architecture == "qwen3":
        writer.add_key_length(config.head_dim)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*alphabet, "Ġa", "Ġab", "<s>", "<think>"])
    writer.add_token_merges(["Ġ a", "Ġa b"])
    writer.add_token_types([1] * 258 + [3, 4])
    for key, value in more.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            add(writer, architecture, name, tensor, config, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, architecture: str, name: str, tensor: Tensor, config: object, kind: Kind) -> None:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])  # type: ignore[attr-defined]
    if architecture == "llama" and heads:
        # llama.cpp turns neighbouring pairs; its converter brings the halves of every head together like this
        tensor = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    for theirs, stored in NAMES.items():
        name = name.replace(theirs, stored)
    data = tensor.numpy()
    if data.ndim == 1 or kind == Kind.F32:
        writer.add_tensor(name, data)
    else:
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)


def randomised(architecture: str) -> PreTrainedModel:
    model, generator = MODELS[architecture](), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.15 + ("norm" in name))
    return model.eval()


@pytest.mark.parametrize(
    "kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q5_0, Kind.Q6_K, Kind.F16, Kind.BF16, Kind.F32], ids=lambda k: k.name
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_unpack_to_what_the_gguf_package_reads(kind: Kind, dtype: torch.dtype) -> None:
    # More rows than fit into one piece, and blocks of random bytes with a sane scale: every pattern of bits occurs.
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    values = rng.standard_normal((600, 512), dtype=np.float32)
    try:
        data = gguf.quants.quantize(values, kind)
    except NotImplementedError:
        data = rng.integers(0, 256, (600, 512 // block * size), dtype=np.uint8)
        data.reshape(-1, size)[:, -2:] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    raw = np.ascontiguousarray(data).view(np.uint8)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind).astype(np.float32))
    out = torch.empty(600, 512, dtype=dtype)
    unpack(torch.from_numpy(raw.copy()), kind, out)
    assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize("architecture", MODELS)
def test_a_model_written_as_gguf_has_the_logits_of_transformers(architecture: str, tmp_path: Path) -> None:
    model, ids = randomised(architecture), torch.randint(0, 260, (2, 40), generator=torch.Generator().manual_seed(1))
    config, state, tokenizer = read_gguf(written(tmp_path / "m.gguf", architecture, model), torch.float32)
    decoder = Decoder.of(config, state)
    with torch.no_grad():
        logits = decoder.logits(decoder(decoder.embed(ids), torch.arange(40).expand(2, -1), NoCache()))
        torch.testing.assert_close(logits, model(ids).logits, rtol=0, atol=1e-4)
    assert config.tied == (architecture == "qwen2") and tokenizer.decode(tokenizer.encode("aba ab")) == "aba ab"


def test_quantised_matrices_keep_their_rows_in_order(tmp_path: Path) -> None:
    model = randomised("llama")
    exact, rounded = (
        read_gguf(written(tmp_path / kind.name, "llama", model, kind), torch.float32)[1] for kind in (Kind.F32, Kind.Q8_0)
    )  # fmt: skip
    for name, tensor in exact.items():
        torch.testing.assert_close(rounded[name], tensor, rtol=0, atol=0.005)


def test_smollm2_tokens_equal_those_of_transformers(mini_language: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(mini_language.parent, gguf_file=mini_language.name).backend_tokenizer
    # transformers leaves out SmolLM's rule that digits stand alone (llama.cpp's `smollm`, and why no merge of it holds one).
    theirs.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), theirs.pre_tokenizer])
    ours, theirs = tokenizer_of(read_file(mini_language).metadata), TextTokenizer(theirs)
    for text in [*CORPUS, "12345 and 3.14159,  2024-01-02 x²", Path(__file__).read_text(encoding="utf-8")]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text)) == text
    specials = [0, 1, 2, 3, 10, 16]
    assert ours.decode(specials) == theirs.decode(specials) == ""
    assert [ours.special(name) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]


def test_smollm2_has_no_token_with_a_digit_beside_anything_else(mini_language: Path) -> None:
    tokens = read_file(mini_language).metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert not [token for token in tokens if len(str(token)) > 1 and any(digit in str(token) for digit in "0123456789")]


@pytest.mark.parametrize("cut", ["qwen2", "llama-bpe", "gpt-2"])
def test_text_is_cut_as_transformers_cuts_it(cut: str, mini_language: Path, tmp_path: Path) -> None:
    metadata = {**read_file(mini_language).metadata, "tokenizer.ggml.pre": cut}
    raw = {"tokenizer_type": "gpt2", "pre_tokenizer_type": cut}
    raw |= {name: metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges")}
    raw["token_type"] = metadata["tokenizer.ggml.token_type"].tolist()
    backend: Backend = convert_gguf_tokenizer("llama", raw)[0]
    ours, theirs = tokenizer_of(metadata), TextTokenizer(backend)
    for text in [*CORPUS, "12345 and 3.14159,  2024-01-02 x²"]:
        # the Qwen2 class of transformers would also compose characters; the cut alone is compared
        assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "gemma3", "gemma3"),
        ("llama.rope.scaling.type", "longrope", "longrope"),
        ("llama.rope.dimension_count", 8, "rope.dimension_count is 8"),
        ("llama.expert_count", 4, "mixture of experts"),
        ("llama.attention.sliding_window", 16, "sliding"),
        ("tokenizer.ggml.pre", "unheard-of", "unheard-of"),
    ],
)
def test_what_is_not_supported_is_named(key: str, value: str | int, message: str, tmp_path: Path) -> None:
    more = {key: value} | ({"llama.rope.scaling.factor": 2.0} if "scaling" in key else {})
    writer_sets_it = key in ("general.architecture", "tokenizer.ggml.pre")
    path = written(tmp_path / "m.gguf", "llama", randomised("llama"), **({} if writer_sets_it else more))
    if writer_sets_it:
        old = {"general.architecture": b"llama", "tokenizer.ggml.pre": b"qwen2"}[key]
        text = str(value).encode()
        path.write_bytes(path.read_bytes().replace(struct.pack("<Q", 5) + old, struct.pack("<Q", len(text)) + text, 1))
    with pytest.raises((ModelError, WeightsError), match=message):
        read_gguf(path, torch.float32)


def test_damage_anywhere_in_the_header_is_an_error_of_ours_and_never_a_crash(tmp_path: Path) -> None:
    good = written(tmp_path / "m.gguf", "llama", randomised("llama")).read_bytes()
    rng = np.random.default_rng(0)
    header = len(good) - sum(t.data.numel() for t in read_file(tmp_path / "m.gguf").tensors.values())
    path = tmp_path / "bad.gguf"
    refused = 0
    for trial in range(150):
        data = bytearray(good)
        place = int(rng.integers(0, header - 8))
        data[place : place + 8] = [b"\xff" * 8, rng.bytes(8), struct.pack("<Q", 2**62)][trial % 3]
        path.write_bytes(data)
        try:
            Decoder.of(*read_gguf(path, torch.float32)[:2])
        except (WeightsError, ModelError):
            refused += 1
    assert refused > 75  # some of the damage falls on words or numbers that nothing depends on


SETTINGS = [
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor", "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_number_in_a_setting_is_a_crash(setting: str, tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 2.0, "attn_factor": 1.0, "original_context_length": 64}
    more = {f"qwen3.rope.scaling.{name}": value for name, value in scaling.items()}
    path = written(tmp_path / "m.gguf", "qwen3", randomised("qwen3"), **more)
    good, key = path.read_bytes(), f"qwen3.{setting}".encode()
    place = good.index(struct.pack("<Q", len(key)) + key) + 8 + len(key) + 4
    Decoder.of(*read_gguf(path, torch.float32)[:2])
    # as whole numbers: none, few, odd, the limits; as floats: zero, the smallest, the largest, just above 1, infinite, no number, negative
    for bits in (0, 1, 3, 1 << 24, (1 << 31) - 1, (1 << 32) - 1, 0x7F7FFFFF, 0x3F800001, 0x7F800000, 0xBF800000):
        path.write_bytes(good[:place] + struct.pack("<I", bits) + good[place + 4 :])
        with contextlib.suppress(WeightsError, ModelError):
            Decoder.of(*read_gguf(path, torch.float32)[:2])


def test_a_context_that_yarn_cannot_stretch_is_named(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 2.0, "original_context_length": 0}
    more = {f"llama.rope.scaling.{name}": value for name, value in scaling.items()}
    path = written(tmp_path / "m.gguf", "llama", randomised("llama"), **more)
    with pytest.raises(ModelError, match=r"m\.gguf.*original_context_length is 0, it must be a number of tokens"):
        read_gguf(path, torch.float32)


def test_an_embedding_with_fewer_rows_than_there_are_tokens_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", "llama", LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 259})))
    with pytest.raises(ModelError, match=r"m\.gguf: the tensor 'token_embd\.weight' has 259 rows.*up to 259"):
        read_gguf(path, torch.float32)


def header_with(path: Path, kind: int, count: int, rest: int) -> Path:
    """A file whose only setting is an array of `count` values of a type, then `rest` zero bytes that take no room on the disk."""
    key = b"general.big"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<IIQ", 9, kind, count))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + rest)
    return path


def test_an_array_of_numbers_takes_no_memory(tmp_path: Path) -> None:
    path = header_with(tmp_path / "m.gguf", 0, 1 << 26, 1 << 26)
    tracemalloc.start()
    try:
        found = read_file(path).metadata["general.big"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(found, np.ndarray) and len(found) == 1 << 26 and peak < 1 << 20


@pytest.mark.parametrize("kind", [9, 77])
def test_an_array_of_arrays_is_refused_before_anything_is_made_of_it(tmp_path: Path, kind: int) -> None:
    with pytest.raises(WeightsError, match="only numbers and texts"):
        read_file(header_with(tmp_path / "m.gguf", kind, 1000, 12_000))


@pytest.mark.parametrize(("kind", "count", "rest"), [(10, 1000, 7999), (8, 1000, 7999), (0, 2**63, 8), (8, 2**61, 8)])
def test_an_array_longer_than_the_file_is_refused(tmp_path: Path, kind: int, count: int, rest: int) -> None:
    with pytest.raises(WeightsError, match="announced"):
        read_file(header_with(tmp_path / "m.gguf", kind, count, rest))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04" + bytes(64), b"GGUF" + struct.pack("<IQQ", 3, 2**40, 2**40)])
def test_what_is_no_gguf_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=r"m\.gguf"):
        read_gguf(path, torch.float32)


def test_a_truncated_file_is_refused_before_anything_is_unpacked(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", "llama", randomised("llama"))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(WeightsError, match="ends at byte"):
        read_gguf(path, torch.float32)
