"""DeepSeek-V3.2 (arXiv 2512.02556): V3, whose latent attention reads what a lightning indexer picks (`mmsdk.attention.dsa`)."""

from mmsdk.attention.dsa import Lightning
from mmsdk.decoder.config import DecoderConfig
from mmsdk.models.text._deepseek import config_of, first_layers, latent_of, names
from mmsdk.models.text.deepseek_v3 import mixture_of
from mmsdk.weights.fields import Fields

__all__ = ["decoder_config", "names"]

_DEFAULTS = DecoderConfig(vocabulary=129_280, width=7168, layers=61, heads=128, kv_heads=1, head_dim=192, inner=18_432, context=163_840)


def decoder_config(fields: Fields) -> DecoderConfig:
    """From the settings of a `deepseek_v32` checkpoint; what is absent has the defaults of transformers' DeepseekV32Config."""
    indexer = Lightning(fields.whole("index_n_heads", 64), fields.whole("index_head_dim", 128), fields.whole("index_topk", 2048))
    attention = latent_of(fields, fields.whole("q_lora_rank", 1536), indexer=indexer)
    return config_of(fields, attention, mixture_of(fields, _plain(fields)), _DEFAULTS)


def _plain(fields: Fields) -> tuple[int, ...]:
    """The layers without experts, by the list of layers where there is one."""
    kinds = fields.values.get("mlp_layer_types")
    if kinds is None:
        return first_layers(fields, 3)
    if not isinstance(kinds, list) or any(kind not in ("dense", "sparse") for kind in kinds):
        raise fields.wrong("mlp_layer_types", "a list of 'dense' and 'sparse'")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
