"""A model whose language model is a GGUF file, beside a folder with all the rest: what transformers says with the same numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmsdk.apps.checkpoints.qwen_vl import QwenReplica
from mmsdk.apps.checkpoints.seeing import compared
from mmsdk.apps.checkpoints.sight import SightReplica
from mmsdk.errors import ModelError, WeightsError
from mmsdk.families import open_model
from mmsdk.models.types import VLM
from mmsdk.prompt import Prompt, Text
from mmsdk.vision.types import Image

CPU = torch.device("cpu")
FILE = "text.gguf"
NAMES = {
    "model.language_model.": "", "embed_tokens": "token_embd", "lm_head": "output", "layers.": "blk.", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output", "self_attn.": "attn_", "mlp.": "ffn_", "_proj": "",
}  # fmt: skip
KINDS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "llava": ("llama", lambda folder: SightReplica.write("llava", folder)),
    "llava_onevision": ("qwen2", lambda folder: SightReplica.write("llava_onevision", folder)),
    "qwen2_vl": ("qwen2vl", lambda folder: QwenReplica.write("qwen2_vl", folder)),
    "qwen3_vl": ("qwen3vl", lambda folder: QwenReplica.write("qwen3_vl", folder)),
}
Opened = tuple[Any, Path]


def model_of(replica: Any) -> Any:
    return replica.parts.model if isinstance(replica, SightReplica) else replica.model


def spoken(name: str) -> bool:
    """Whether a tensor is the language model's, by the names of today or, as some are saved, of earlier years."""
    return "language_model" in name or "lm_head" in name


def stored(name: str) -> str:
    if name == "model.language_model.norm.weight":
        return "output_norm.weight"
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def interleaved(name: str, tensor: Tensor, config: Any) -> Tensor:
    """llama.cpp turns neighbouring pairs; its converter brings the halves of every head together like this."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape) if heads else tensor


def write(model: Any, architecture: str, path: Path, kind: Kind) -> None:
    """The language model of a larger one as a GGUF file, which then has the very numbers that the file has."""
    config, writer = model.config.text_config, gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture.endswith("vl"):
        writer.add_rope_dimension_sections([2, 3, 3, 0])
    for name, tensor in model.state_dict().items():
        if not spoken(name) or (name == "lm_head.weight" and model.config.tie_word_embeddings):
            continue
        rows = interleaved(name, tensor, config) if architecture == "llama" else tensor
        if tensor.ndim == 1 or kind == Kind.F32:
            writer.add_tensor(stored(name), rows.contiguous().numpy())
            continue
        writer.add_tensor(stored(name), gguf.quants.quantize(rows.contiguous().numpy(), kind), raw_dtype=kind)
        # blocks lie within rows, so that the order of rows changes none
        tensor.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module", params=KINDS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """A model, and a folder of it without the tensors of its language model, which are in a GGUF file of 8 bits."""
    architecture, made = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    replica = made(folder)
    write(model_of(replica), architecture, folder / FILE, Kind.Q8_0)
    path = folder / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if not spoken(name)}, path)
    return replica, folder


def opened(folder: Path, gguf_file: str = FILE) -> VLM:
    return open_model(str(folder), torch.float32, CPU, gguf_file=gguf_file)


def test_answers_are_those_of_transformers_with_the_numbers_of_the_file(written: Opened) -> None:
    replica, folder = written
    picture = Image(torch.randint(0, 256, (3, 40, 56), generator=torch.Generator().manual_seed(5), dtype=torch.uint8))
    vlm = opened(folder)
    for prompt in (Prompt((picture, Text("What is this?"))), Prompt((Text("What is two and two?"),))):
        found = compared(replica, vlm, prompt, 32)
        assert found.apart <= 1e-4 and found.same


def test_a_file_from_elsewhere_is_taken_by_its_path(written: Opened, tmp_path: Path) -> None:
    _, folder = written
    away = tmp_path / "away.gguf"
    away.write_bytes((folder / FILE).read_bytes())
    assert torch.equal(opened(folder, str(away)).decoder.embedding.weight, opened(folder).decoder.embedding.weight)


def test_a_file_that_is_not_there_and_one_of_another_model_are_told(written: Opened, tmp_path: Path) -> None:
    _, folder = written
    with pytest.raises(WeightsError, match=r"no GGUF file 'other\.gguf'.*there is text\.gguf"):
        opened(folder, "other.gguf")
    with pytest.raises(ModelError, match="lacks the tensor"):
        open_model(str(folder), torch.float32, CPU)
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["num_key_value_heads"] = config["text_config"]["num_attention_heads"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"text\.gguf: its kv_heads is 2, .*text_config says 4"):
        opened(tmp_path)
    with pytest.raises(ModelError, match="brings its own language model"):
        open_model("mini", torch.float32, CPU, gguf_file=FILE)
