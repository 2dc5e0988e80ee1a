"""Tiny decoders, made by transformers and read by us, and moments that they are shown."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.transformer import Decoder
from mmsdk.kv.selection import BlockLayout
from mmsdk.models.text import read_decoder
from mmsdk.vla.heads.flow import noise_of

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "yarn": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=YARN)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
}


@pytest.fixture(scope="session", params=FAMILIES)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Decoder]:
    """One model twice, transformers' and ours: a tiny Llama, Qwen2, Qwen3 and a Llama whose rotations are scaled."""
    return both(FAMILIES[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def gemmas(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Decoder]:
    """A tiny Gemma 3 twice: norms behind attention and feed-forward, and layers that turn by frequencies of their own."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, layer_types=kinds))
    return both(model, tmp_path_factory.mktemp("gemma3"))


def both(model: PreTrainedModel, folder: Path) -> tuple[PreTrainedModel, Decoder]:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.25 + ("norm" in name))
    logging.disable_progress_bar()
    model.eval().save_pretrained(folder)
    logging.enable_progress_bar()
    return model, read_decoder(folder, torch.float32)


@pytest.fixture(scope="session")
def fill() -> Callable[[nn.Module, int], dict[str, Tensor]]:
    """Weights for a module from a seed, large enough that a mistake shows."""

    def filled(module: nn.Module, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(tensor.shape, generator=generator) * 0.25 for name, tensor in module.state_dict().items()}

    return filled


@pytest.fixture(scope="session")
def decoder(fill: Callable[[nn.Module, int], dict[str, Tensor]]) -> Decoder:
    """A tiny Gemma-like decoder."""
    config = DecoderConfig(40, 32, 3, 4, 2, 8, 48, 128, activation="gelu_tanh")
    return Decoder.of(config, fill(Decoder(config), 0))


@pytest.fixture(scope="session")
def layout() -> BlockLayout:
    """Two cameras and three words."""
    return BlockLayout(cameras=(4, 3), words=3)


@pytest.fixture(scope="session")
def moments() -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Six moments of two rows: visual tokens, cameras, words, which of them are said.

    The second row's first camera is masked, and the first row says a word less.
    """
    present = torch.tensor([[True, True], [False, True]])
    said = torch.tensor([[True, True, False], [True, True, True]])
    return [(noise_of(50 + i, (2, 7, 32)), present, torch.tensor([[3, 4, 5], [6, 7, 8]]) + i, said) for i in range(6)]
