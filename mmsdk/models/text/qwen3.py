"""Qwen3 (arXiv 2505.09388): an RMSNorm over each head of queries and keys, and a head width of its own."""

from mmsdk.decoder.config import DecoderConfig
from mmsdk.weights.fields import Fields
from mmsdk.weights.names import HUGGINGFACE
from mmsdk.weights.rope import rope

__all__ = ["decoder_config", "names"]

names = HUGGINGFACE


def decoder_config(fields: Fields) -> DecoderConfig:
    """From the settings of a `qwen3` checkpoint; what is absent has the defaults of transformers' Qwen3Config."""
    theta, scaling = rope(fields, context=32_768)
    return DecoderConfig(
        vocabulary=fields.whole("vocab_size", 151_936),
        width=fields.whole("hidden_size", 4096),
        layers=fields.whole("num_hidden_layers", 32),
        heads=fields.whole("num_attention_heads", 32),
        kv_heads=fields.whole("num_key_value_heads", 32),
        head_dim=fields.whole("head_dim", 128),
        inner=fields.whole("intermediate_size", 22_016),
        context=fields.whole("max_position_embeddings", 32_768),
        norm_eps=fields.real("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=fields.flag("attention_bias", default=False),
        o_bias=fields.flag("attention_bias", default=False),
        qk_norm=True,
        tied=fields.flag("tie_word_embeddings", default=False),
    )
