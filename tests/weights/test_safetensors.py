"""Folders in the Hugging Face layout: shards, and checkpoints that are damaged, hostile or not for this decoder."""

import json
import math
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config

from mmsdk.decoder.rope import Rope
from mmsdk.errors import ModelError, WeightsError
from mmsdk.models.text import load_decoder, read_config, read_decoder
from mmsdk.weights.fields import Fields
from mmsdk.weights.hub import resolve
from mmsdk.weights.safetensors import open_checkpoint

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 24, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny llama in one file."""
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    return tmp_path


def configured(folder: Path, **change: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def restored(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_every_tensor_is_read_as_it_was_written(folder: Path) -> None:
    checkpoint, stored = open_checkpoint(folder), load_file(folder / "model.safetensors")
    assert checkpoint.files.keys() == stored.keys()
    for name, tensor in stored.items():
        out = torch.empty(checkpoint.shape(name), dtype=torch.bfloat16)
        checkpoint.read(name, out)
        assert torch.equal(out, tensor.to(torch.bfloat16))


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs Linux's account of memory")
def test_files_are_mapped_and_read_straight_to_their_place(tmp_path: Path) -> None:
    """128 MB in float32, opened for nothing, and read to bfloat16 for no more than the 64 MB that it then takes."""
    save_file({"a": torch.ones(1 << 24), "b": torch.ones(1 << 24)}, tmp_path / "model.safetensors")
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    opened, read = map(int, done.stdout.split())
    assert opened < 8 << 20 and 60 << 20 < read < 80 << 20


# In a process of its own, which has freed nothing yet that could be used again: the bytes that no file stands behind, opened and read.
MEASURE = """
import sys
from pathlib import Path
import torch
from mmsdk.weights.safetensors import open_checkpoint

def anonymous() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) << 10

before = anonymous()
checkpoint = open_checkpoint(Path(sys.argv[1]))
assert checkpoint.shape("a") == (1 << 24,) and checkpoint.size == 1 << 27
opened = anonymous() - before
state = {name: torch.empty(1 << 24, dtype=torch.bfloat16) for name in ("a", "b")}
for name, out in state.items():
    checkpoint.read(name, out)
print(opened, anonymous() - before)
assert all(bool((out == 1).all()) for out in state.values())
"""


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.mark,)


def test_a_pickle_is_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder / "ran")))
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin is a pickle.*convert"):
        read_decoder(folder, torch.float32)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08\x00\x00\x00\x00\x00\x00\x00{}",
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 8) + b"not json",
        struct.pack("<Q", 75) + b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}',
    ],
)
def test_a_bad_header_is_refused(content: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        read_decoder(folder, torch.float32)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(WeightsError, match="damaged"):
        read_decoder(folder, torch.float32)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "model.bin", "sub/model.safetensors", 7])
def test_an_index_names_only_safetensors_of_its_own_folder(shard: object, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    with pytest.raises((WeightsError, ModelError), match=r"own folder|must be a text"):
        read_decoder(folder, torch.float32)


def test_a_missing_shard_and_a_broken_promise_are_named(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(WeightsError, match="model-00001-of-00002"):
        read_decoder(folder, torch.float32)
    index.write_text(json.dumps({"weight_map": {"model.other.weight": "model.safetensors"}}))
    with pytest.raises(WeightsError, match=r"model\.other\.weight"):
        read_decoder(folder, torch.float32)


def test_missing_extra_and_misshapen_tensors_are_named(folder: Path) -> None:
    good = (folder / "model.safetensors").read_bytes()
    for name, change in {
        "model.norm.weight": lambda tensors: tensors.pop("model.norm.weight"),
        "extra.weight": lambda tensors: tensors.update({"extra.weight": torch.ones(2)}),
        "layers.0.self_attn.q_proj.weight": lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.weight": torch.ones(4, 16)}),
        "model.layers.0.self_attn.k_proj.weight": lambda tensors: tensors.update(
            {"model.layers.0.self_attn.k_proj.weight": torch.ones(8, 15)}
        ),
        "model.embed_tokens.weight": lambda tensors: tensors.update({"model.embed_tokens.weight": torch.ones(32, 16, dtype=torch.int8)}),
    }.items():
        (folder / "model.safetensors").write_bytes(good)
        restored(folder, change)
        with pytest.raises(ModelError, match=name):
            read_decoder(folder, torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "mamba.*llama, .*qwen2, .*qwen3"),
        ({"model_type": "../../evil"}, "evil"),
        ({"model_type": None}, "model_type"),
        ({"num_hidden_layers": 10**12}, "layers"),
        ({"num_hidden_layers": 2}, r"layers\.1"),
        ({"hidden_size": "16"}, "hidden_size"),
        ({"num_attention_heads": 0}, "heads"),
        ({"rms_norm_eps": 1e999}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"use_sliding_window": True}, "sliding"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}}, "short_factor"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 4}},
            "short_factor and long_factor",
        ),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 0.0, 1.0, 1.0]}}, "long_factor"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": -1.0}}, "factor"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, "factor"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}},
            "original_max_position_embeddings",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_slow": 1e-320}}, "beta_slow"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": -1.0}}, "mscale"),
        ({"rope_parameters": None, "rope_scaling": {"type": "unheard-of", "factor": 2.0}}, "unheard-of"),
    ],
)
def test_settings_that_cannot_be_run_are_refused_by_name(change: dict[str, object], message: str, folder: Path) -> None:
    configured(folder, **change)
    with pytest.raises(ModelError, match=message):
        read_decoder(folder, torch.float32)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, '"text"'])
def test_a_config_that_is_no_object_is_refused(content: str, folder: Path) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_decoder(folder, torch.float32)


def test_earlier_checkpoints_state_rope_in_two_settings() -> None:
    old = {**SIZES, "model_type": "qwen2", "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    config = Qwen2Config(**old)
    new = read_config(Fields("new", config.to_dict()))
    assert read_config(Fields("old", old)) == new and new.rope_theta == 5e5 and new.rope_scaling.factor == 2.0  # type: ignore[union-attr]


NUMBERS = st.one_of(st.floats(), st.integers(-(2**70), 2**70), st.sampled_from([0, 1e-320, 1 + 1e-15, 1e299, 10**400, math.exp(10.0)]))
SETTINGS = [
    "factor", "rope_theta", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "attention_factor",
]  # fmt: skip


@settings(deadline=None)
@given(
    st.sampled_from(["default", "linear", "dynamic", "llama3", "longrope", "yarn"]),
    st.fixed_dictionaries({}, optional=dict.fromkeys(SETTINGS, NUMBERS)),
)
def test_no_number_in_a_rope_setting_is_a_crash(kind: str, chosen: dict[str, float]) -> None:
    divisors = {"short_factor": [1.0, 1.1, 1.2, 2.0], "long_factor": [1.0, 2.0, 3.0, 4.0]}
    group = {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **divisors, **chosen}
    fields = Fields("config", {**SIZES, "model_type": "llama", "rope_parameters": group})
    try:
        config = read_config(fields)
    except ModelError:
        return
    Rope(config.head_dim, config.rope_theta, config.rope_scaling)(torch.arange(100)[None], torch.float32)


def test_an_embedding_with_fewer_rows_than_there_are_ids_is_refused(folder: Path) -> None:
    Backend(models.WordLevel({"a": 0, "b": 32}, unk_token="a")).save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelError, match=r"the tensor 'model\.embed_tokens\.weight' has 32 rows.*up to 32"):
        load_decoder(folder, torch.float32)
    Backend(models.WordLevel({"a": 0, "b": 31}, unk_token="a")).save(str(folder / "tokenizer.json"))
    load_decoder(folder, torch.float32)


def test_a_tokenizer_that_is_missing_or_damaged_is_named(folder: Path) -> None:
    for content in (None, "{", '{"model": {}}'):
        if content is not None:
            (folder / "tokenizer.json").write_text(content)
        with pytest.raises(WeightsError, match=r"tokenizer\.json"):
            load_decoder(folder, torch.float32)


def test_a_folder_is_its_own_answer_and_what_cannot_be_had_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(folder)) == folder
    with pytest.raises(WeightsError, match="neither a folder nor"):
        resolve("not//a name")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsError, match="cannot be fetched"):
        resolve("mmsdk-tests/no-such-model")
