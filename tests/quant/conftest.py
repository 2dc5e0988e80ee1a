"""A small llama as other people's software writes it."""

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

HEADS, KV_HEADS = 4, 2
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers.": "blk.",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_", "mlp.": "ffn_", "_proj": "",
}  # fmt: skip

Small = Callable[[bool], LlamaForCausalLM]
Written = Callable[[LlamaForCausalLM, Kind], Path]


@pytest.fixture(scope="module")
def small() -> Small:
    """A random llama of transformers, tied or not."""

    def make(tied: bool) -> LlamaForCausalLM:
        config = LlamaConfig(
            vocab_size=260, hidden_size=64, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
            intermediate_size=96, max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=tied,
        )  # fmt: skip
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(torch.randn(weight.shape) * 0.15 + ("norm" in name))
        return model

    return make


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """The same as a GGUF file, by the gguf package's writer: matrices in a kind of block, the vocabulary's in Q8_0 unless that is F32."""

    def write(model: LlamaForCausalLM, kind: Kind) -> Path:
        path, config = tmp_path / f"{kind.name}.gguf", model.config
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(10_000.0)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list([*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "Ġab", "<s>", "<think>"])
        writer.add_token_merges(["Ġ a", "Ġa b"])
        writer.add_token_types([1] * 258 + [3, 4])
        for name, tensor in model.state_dict().items():
            if name != "lm_head.weight" or not config.tie_word_embeddings:
                add(writer, name, tensor, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: Kind) -> None:
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    if heads:
        # llama.cpp turns neighbouring pairs; its converter brings the halves of every head together like this
        tensor = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
    vocabulary = "embed" in name or "lm_head" in name
    for theirs, stored in NAMES.items():
        name = name.replace(theirs, stored)
    kind = Kind.Q8_0 if vocabulary and kind != Kind.F32 else kind
    if tensor.ndim == 1 or kind == Kind.F32:
        writer.add_tensor(name, tensor.numpy())
    else:
        writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
