"""DeepSeek-V3 (arXiv 2412.19437) and R1: latent attention; experts by sigmoid with a balancing bias, within the best groups."""

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.moe import Mixture
from mmsdk.models.text._deepseek import config_of, first_layers, latent_of, names
from mmsdk.weights.fields import Fields

__all__ = ["decoder_config", "mixture_of", "names"]

_DEFAULTS = DecoderConfig(vocabulary=129_280, width=7168, layers=61, heads=128, kv_heads=1, head_dim=192, inner=18_432, context=4096)


def decoder_config(fields: Fields) -> DecoderConfig:
    """From the settings of a `deepseek_v3` checkpoint; what is absent has the defaults of transformers' DeepseekV3Config."""
    q_rank = fields.whole("q_lora_rank", 0 if "q_lora_rank" in fields.values else 1536)
    attention = latent_of(fields, q_rank, fields.flag("rope_interleave", default=True))
    return config_of(fields, attention, mixture_of(fields, first_layers(fields, 3)), _DEFAULTS)


def mixture_of(fields: Fields, plain: tuple[int, ...]) -> Mixture:
    """The experts, which all layers but the `plain` ones have; what is absent has the defaults of V3."""
    if fields.text("scoring_func", "sigmoid") != "sigmoid":
        raise fields.wrong("scoring_func", "'sigmoid'")
    if fields.text("topk_method", "noaux_tc") != "noaux_tc":
        raise fields.wrong("topk_method", "'noaux_tc'")
    inner = fields.whole("moe_intermediate_size", 2048)
    return Mixture(
        experts=fields.whole("n_routed_experts", 256),
        chosen=fields.whole("num_experts_per_tok", 8),
        inner=inner,
        shared=inner * fields.whole("n_shared_experts", 1),
        scoring="sigmoid",
        groups=fields.whole("n_group", 8),
        chosen_groups=fields.whole("topk_group", 4),
        balanced=True,
        normalised=fields.flag("norm_topk_prob", default=True),
        scale=fields.real("routed_scaling_factor", 2.5),
        plain=plain,
    )
