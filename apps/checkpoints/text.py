"""Text models at tiny size: a folder that `save_pretrained` wrote, and what transformers makes of ids."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from mmsdk.apps.checkpoints.drawn import draw

__all__ = ["KINDS", "VOCABULARY", "Kind", "TextReplica"]

Kind = Literal[
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4"
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
VOCABULARY = 256

_YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_HEADS = {"head_dim": 16}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "rope_parameters": _YARN,
}  # fmt: skip
_OWN: Mapping[Kind, Mapping[str, object]] = MappingProxyType(
    {
        "llama": _HEADS,
        "mistral": {**_HEADS, "sliding_window": None},
        "qwen2": {},
        "qwen3": _HEADS,
        "gemma": _HEADS,
        # windows shorter than a prompt
        "gemma3_text": {
            **_HEADS,
            "query_pre_attn_scalar": 24,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy"},
        "deepseek_v3": _LATENT,
        # fewer entries than a prompt has tokens, so that there is a choice
        "deepseek_v32": {**_LATENT, "index_n_heads": 8, "index_head_dim": 16, "index_topk": 16},
        # likewise, and shorter windows, so that a prompt completes some of each kind
        "deepseek_v4": {
            **_LATENT,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "o_groups": 2,
            "o_lora_rank": 12,
            "index_n_heads": 16,
            "index_head_dim": 16,
            "index_topk": 6,
            "sliding_window": 8,
            "num_hash_layers": 1,
            "compress_rate_hca": 16,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", *["heavily_compressed", "compressed_sparse"] * 2)][:4],
        },
    }
)


@dataclass(frozen=True, slots=True)
class TextReplica:
    """A folder and the transformers model that wrote it."""

    kind: Kind
    folder: Path
    model: Any

    @staticmethod
    def write(kind: Kind, folder: Path, seed: int = 0) -> "TextReplica":
        """Random weights, large enough that answers vary."""
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**_SIZES, **_OWN[kind]}), dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(seed)
        draw(model, generator)
        for name, one in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                one.normal_(0, 0.15, generator=generator)
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):
                table.copy_(torch.rand(len(table), model.config.n_routed_experts, generator=generator).argsort(1)[:, : table.shape[1]])
        model.generation_config.eos_token_id = None
        logging.disable_progress_bar()
        model.save_pretrained(folder)
        logging.enable_progress_bar()
        return TextReplica(kind, folder, model)

    @torch.no_grad()
    def logits(self, ids: Int[Tensor, "1 s"]) -> Float[Tensor, "s v"]:
        """Scores at every token."""
        scores: Tensor = self.model(ids).logits[0]
        return scores

    @torch.no_grad()
    def says(self, ids: Int[Tensor, "1 s"], tokens: int) -> list[int]:
        """Greedy tokens."""
        whole = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        said: list[int] = whole[0, ids.shape[1] :].tolist()
        return said
