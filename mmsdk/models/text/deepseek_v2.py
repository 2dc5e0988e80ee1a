"""DeepSeek-V2 (arXiv 2405.04434): latent attention; experts by softmax, in V2 proper within the best groups, in V2-Lite without groups."""

from dataclasses import replace

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.moe import Mixture
from mmsdk.errors import ModelError
from mmsdk.models.text._deepseek import config_of, first_layers, latent_of, names
from mmsdk.weights.fields import Fields

__all__ = ["decoder_config", "names"]

_DEFAULTS = DecoderConfig(vocabulary=102_400, width=4096, layers=32, heads=32, kv_heads=1, head_dim=192, inner=11_008, context=2048)


def decoder_config(fields: Fields) -> DecoderConfig:
    """From the settings of a `deepseek_v2` checkpoint; what is absent has the defaults of transformers' DeepseekV2Config."""
    # Null, which V2-Lite has, is no rank, and absent is the default.
    q_rank = fields.whole("q_lora_rank", 0 if "q_lora_rank" in fields.values else 1536)
    config = config_of(fields, latent_of(fields, q_rank), _mixture(fields), _DEFAULTS)
    return replace(config, mlp_bias=fields.flag("mlp_bias", default=False))


def _mixture(fields: Fields) -> Mixture:
    method, inner = fields.text("topk_method", "greedy"), fields.whole("moe_intermediate_size", 1407)
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.wrong("topk_method", "'greedy' or 'group_limited_greedy'")
    if fields.flag("norm_topk_prob", default=False) or fields.text("scoring_func", "softmax") != "softmax":
        raise ModelError(f"{fields.where}: experts are weighted by a plain softmax here (norm_topk_prob false, scoring_func 'softmax')")
    grouped = method == "group_limited_greedy"
    return Mixture(
        experts=fields.whole("n_routed_experts", 64),
        chosen=fields.whole("num_experts_per_tok"),
        inner=inner,
        shared=inner * fields.whole("n_shared_experts", 2),
        scoring="softmax",
        groups=fields.whole("n_group") if grouped else 1,
        chosen_groups=fields.whole("topk_group") if grouped else 1,
        scale=fields.real("routed_scaling_factor", 1.0),
        plain=first_layers(fields, 0),
    )
